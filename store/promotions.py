"""Decisions about champions: numbered rows of the table promotions, which are only ever added.

Whoever decides holds a lease, and rows are fenced (store/fences.py): once a later holder has begun,
an earlier one that wakes up adds nothing.
"""

import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from store.fences import TRIES, Fence
from store.lease import Lease
from store.schemas import PROMOTIONS
from store.tables import Conflict, Table

MOVES = ("promote", "rollback")
"""Actions that change the champion."""


class Decisions:
    """Decisions under a lease. Making one raises Lost if the lease has ended."""

    def __init__(self, table: Table, held: Lease):
        self.table, self.held, self.fence = table, held, Fence(table, held)

    def append(self, record: dict[str, Any]) -> dict[str, Any]:
        """As `append`, under the lease."""
        return append(self.table, record, self)


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
            decisions.fence.check(version or 0)
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
