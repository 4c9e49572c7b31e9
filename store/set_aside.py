"""Samples that harvest left out, by features key; one small row per sample.

They are not tried again under that key, except where the fault may be the engine's
(jobs/harvesting/screening.py). Then another backend or dtype tries them, and samples that are fit
leave this list.
"""

from collections.abc import Collection
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from store.ids import short_hash
from store.schemas import SET_ASIDE
from store.shards import read_dataset, read_manifests, write_manifest, write_shard


def write_set_aside(
    folder: Path, features_key: str, rows: list[dict], fit: Collection[str] = ()
) -> None:
    """Publish SET_ASIDE rows of one features key beside the earlier ones, the newest per sample.

    fit: ids of samples that have features by now; their earlier rows are dropped.
    """
    before = read_set_aside(folder, features_key)
    left = {name: row for name, row in before.items() if name not in fit}
    now = left | {row["sample_id"]: row for row in rows}
    if now == before:
        return
    live = read_manifests(folder)
    replaces = [m["key"] for m in live if m["inputs"].get("features_key") == features_key]
    ordered = [now[name] for name in sorted(now)]
    found = [[row["sample_id"], str(row["found_at"])] for row in ordered]
    key = short_hash([features_key, replaces, found])
    table = pa.Table.from_pylist(ordered, schema=SET_ASIDE)
    shards = [write_shard(folder / f"{key}.parquet", table)] if now else []
    write_manifest(folder, key, shards, {"features_key": features_key}, replaces=replaces)


def read_set_aside(folder: Path, features_key: str) -> dict[str, dict]:
    """SET_ASIDE rows of this features key by sample id, the newest of each."""
    mine = pc.field("features_key") == features_key
    rows = read_dataset(folder, SET_ASIDE, filters=mine).sort_by("found_at").to_pylist()
    return {row["sample_id"]: row for row in rows}
