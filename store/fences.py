"""A table that only the latest holder of a lease adds to.

A `Fence` begins with an empty commit that notes the number of the lease. Its holder may commit only
if no other lease was noted since, and only as the next version of the table. So once a later holder
has begun, an earlier one that was suspended and wakes up commits nothing.
"""

from store.lease import Lease, Lost
from store.tables import Table

TRIES = 60
"""Most attempts of one commit. Each is lost only to a commit of another writer, such as gc."""


class Fence:
    """The fence of `held` around `table`. Raises Lost if the lease has ended."""

    def __init__(self, table: Table, held: Lease):
        held.check()
        self.held, self.table = held, table
        note = {"lease": held.number}
        self.since = table.change(lambda live: ([], []), note, empty=True)

    def check(self, version: int) -> None:
        """Raise Lost unless this is the last holder to have begun, as of a version of the table."""
        self.held.check()
        noted = [self.table.note(v).get("lease") for v in range(self.since + 1, version + 1)]
        if set(noted) - {None, self.held.number}:
            raise Lost(
                f"{self.held.place}: lease {self.held.number} ended, and a later holder has begun: "
                "nothing was recorded, run the same command again"
            )
        self.since = max(self.since, version)  # what is known is not read again
