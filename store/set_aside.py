"""Samples that harvest left out, by features key: narrow rows, never tried again under that key."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from store.ids import short_hash
from store.schemas import SET_ASIDE
from store.shards import is_complete, read_dataset, shard_info, write_manifest, write_shard


def write_set_aside(folder: Path, rows: list[dict]) -> None:
    """Publish SET_ASIDE rows of one features key. The same samples again change nothing."""
    if not rows:
        return
    rows = sorted(rows, key=lambda row: row["sample_id"])
    key = short_hash([rows[0]["features_key"], [row["sample_id"] for row in rows]])
    path = folder / f"{key}.parquet"
    table = pa.Table.from_pylist(rows, schema=SET_ASIDE)
    shard = shard_info(path) if is_complete(path) else write_shard(path, table)
    write_manifest(folder, key, [shard], {"features_key": rows[0]["features_key"]})


def read_set_aside(folder: Path, features_key: str) -> dict[str, dict]:
    """SET_ASIDE rows of this features key by sample id, the first found of each."""
    mine = pc.field("features_key") == features_key
    rows = read_dataset(folder, SET_ASIDE, filters=mine).sort_by("found_at").to_pylist()
    return {row["sample_id"]: row for row in reversed(rows)}
