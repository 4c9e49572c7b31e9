"""Decisions about champions: numbered rows of the table promotions, which are only ever added.

Whoever decides holds a lease. `Decisions` begins with an empty commit that notes the number of the
lease. A holder adds a row only if no other lease was noted since its own, and only as the next
version of the table. So once a later holder has begun, an earlier one that wakes up adds nothing.
"""

import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from store.lease import Lease, Lost
from store.schemas import PROMOTIONS
from store.tables import Conflict, Table

MOVES = ("promote", "rollback")
"""Actions that change the champion."""
TRIES = 60


class Decisions:
    """Decisions under a lease. Making one raises Lost if the lease has ended."""

    def __init__(self, table: Table, held: Lease):
        held.check()
        self.table, self.held = table, held
        note = {"lease": held.number}
        self.since = table.change(lambda live: ([], []), note, empty=True)

    def append(self, record: dict[str, Any]) -> dict[str, Any]:
        """As `append`, under the lease."""
        return append(self.table, record, self)

    def check(self, version: int) -> None:
        """Raise Lost unless this is the last holder to have begun, as of a version of the table."""
        self.held.check()
        noted = [self.table.note(v).get("lease") for v in range(self.since + 1, version + 1)]
        if set(noted) - {None, self.held.number}:
            raise Lost(
                f"{self.held.place}: lease {self.held.number} ended, and a later holder has begun: "
                "nothing was recorded, run the same command again"
            )


def append(
    table: Table, record: dict[str, Any], decisions: Decisions | None = None
) -> dict[str, Any]:
    """Add `record` under the next number; returns it with `number`, `lease` and `decided_at` (UTC
    now). Two writers get two numbers.

    `record` holds the other columns of PROMOTIONS; `evidence` may be anything JSON. Raises
    ValueError for a column that PROMOTIONS lacks.
    """
    unknown = set(record) - set(PROMOTIONS.names)
    if unknown:
        raise ValueError(f"no such column in promotions: {', '.join(sorted(unknown))}")
    for _ in range(TRIES):
        version = table.version()
        if decisions is not None:
            decisions.check(version or 0)
        known = table.read(["number"], version=version)["number"].to_pylist()
        full = {"number": max(known, default=0) + 1, "decided_at": datetime.now(UTC), **record}
        full["lease"] = None if decisions is None else decisions.held.number
        row = full | {"evidence": json.dumps(record.get("evidence"))}
        shard = table.write(pa.Table.from_pylist([row], schema=PROMOTIONS))
        try:
            table.change(lambda live, shard=shard: ([shard], []), expect=version or 0)
        except Conflict:
            continue  # another decision has this number
        return full
    raise OSError(f"{table.place}: {TRIES} commits were lost to other writers; run again")


def read(table: Table) -> list[dict[str, Any]]:
    """All decisions, the oldest first; empty if there are none. `evidence` is what it was."""
    rows = table.read().sort_by("number").to_pylist()
    return [row | {"evidence": json.loads(row["evidence"] or "null")} for row in rows]
