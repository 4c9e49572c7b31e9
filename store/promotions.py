"""Decisions about champions: numbered rows of the table promotions, which are only ever added."""

import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from store.lease import Lease, Lost
from store.schemas import PROMOTIONS
from store.tables import Conflict, Table

TRIES = 60


def append(table: Table, record: dict[str, Any], held: Lease | None = None) -> dict[str, Any]:
    """Add `record` under the next number; returns it with `number` and `decided_at` (UTC now).

    `record` holds the other columns of PROMOTIONS; `evidence` may be anything JSON. Two writers get
    two numbers. held: the lease under which it was decided. Raises Lost if a later holder of that
    lease has decided since, and ValueError for a column that PROMOTIONS lacks.
    """
    unknown = set(record) - set(PROMOTIONS.names)
    if unknown:
        raise ValueError(f"no such column in promotions: {', '.join(sorted(unknown))}")
    for _ in range(TRIES):
        version = table.version()
        known = table.read(["number", "lease"], version=version).to_pylist()
        if held is not None:
            held.check()
            if any((row["lease"] or 0) > held.number for row in known):
                raise Lost(
                    f"{held.place}: lease {held.number} ended, and a later holder has decided "
                    "since: nothing was recorded, run the same command again"
                )
        full = {
            "number": max((row["number"] for row in known), default=0) + 1,
            "decided_at": datetime.now(UTC),
            **record,
            "lease": None if held is None else held.number,
        }
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
