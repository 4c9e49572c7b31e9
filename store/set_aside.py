"""Samples that harvest left out, by features key: the table set_aside, one small row per sample.

They are not tried again under that key, except where the fault may be the engine's
(jobs/harvesting/screening.py). Then another backend or dtype tries them, and samples that are fit
leave this list.
"""

from collections.abc import Collection
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from store.schemas import SET_ASIDE
from store.tables import Table


def write_set_aside(
    table: Table, features_key: str, rows: list[dict[str, Any]], fit: Collection[str] = ()
) -> None:
    """Publish SET_ASIDE rows of one features key beside the earlier ones, the newest per sample.

    fit: ids of samples that have features by now; their earlier rows are dropped.
    """
    before = read_set_aside(table, features_key)
    left = {name: row for name, row in before.items() if name not in fit}
    now = left | {row["sample_id"]: row for row in rows}
    if now == before:
        return
    ordered = [now[name] for name in sorted(now)]
    shards = [table.write(pa.Table.from_pylist(ordered, schema=SET_ASIDE))] if now else []
    table.replace("features_key", [features_key], shards)


def read_set_aside(table: Table, features_key: str) -> dict[str, dict[str, Any]]:
    """SET_ASIDE rows of this features key by sample id, the newest of each."""
    rows = table.read(where=pc.field("features_key") == features_key)
    return {row["sample_id"]: row for row in rows.sort_by("found_at").to_pylist()}
