"""Decisions about champions: numbered JSON files that are only ever added."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from store import files
from store.schemas import PROMOTIONS


def append(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Write `record` under the next number; returns it with `number` and `decided_at` (UTC now).

    `record` holds the other columns of PROMOTIONS; `evidence` may be anything JSON. Two writers get
    two numbers. Raises ValueError for a column that PROMOTIONS lacks.
    """
    unknown = set(record) - set(PROMOTIONS.names)
    if unknown:
        raise ValueError(f"no such column in promotions: {', '.join(sorted(unknown))}")
    number = len(read(folder))
    while True:
        number += 1
        full = {"number": number, "decided_at": datetime.now(UTC).isoformat(), **record}
        data = json.dumps(full, indent=1).encode() + b"\n"
        path = folder / f"{number:06d}.json"
        if files.commit(path, lambda stream, data=data: stream.write(data), overwrite=False):
            return full


def read(folder: Path) -> list[dict[str, Any]]:
    """All decisions, the oldest first; empty if there are none. ValueError names a bad file."""
    records = []
    for path in sorted(folder.glob("[0-9]*.json")):
        records.append(
            files.read_json(path, ["number", "decided_at", "action"], "restore it from a backup")
        )
    return records


def read_table(folder: Path) -> pa.Table:
    """All decisions as a PROMOTIONS table, `evidence` as JSON text."""
    rows = [
        record
        | {
            "decided_at": datetime.fromisoformat(record["decided_at"]),
            "evidence": json.dumps(record.get("evidence")),
        }
        for record in read(folder)
    ]
    return pa.Table.from_pylist(rows, schema=PROMOTIONS)
