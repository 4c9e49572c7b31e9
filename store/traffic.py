"""Reading traffic: one row per sample, whatever the number of logs that carried it."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from store.schemas import TRAFFIC
from store.shards import read_dataset


def read_traffic(folder: Path, target_id: str | None = None, split: str | None = None) -> pa.Table:
    """Published samples as TRAFFIC rows, sorted by sample_id, so the order never depends on logs.

    Rows of the same sample are merged: the earliest captured row stays (its conversation decides
    the split) and gets the sum of the repeat counts. `target_id` and `split` select rows.
    """
    mine = None if target_id is None else pc.field("target_id") == target_id
    table = merge_repeats(read_dataset(folder, TRAFFIC, filters=mine))
    # Selected after merging: a sample seen in two conversations belongs to one split only.
    return table if split is None else table.filter(pc.field("split") == split)


def merge_repeats(table: pa.Table) -> pa.Table:
    """TRAFFIC rows with equal sample_id merged into one, sorted by sample_id."""
    if table.num_rows == 0:
        return table
    order = [("sample_id", "ascending"), ("captured_at", "ascending"), ("request_id", "ascending")]
    table = table.sort_by(order)
    names = table["sample_id"].to_numpy(zero_copy_only=False)
    first = np.flatnonzero(np.concatenate([[True], names[1:] != names[:-1]]))
    repeats = np.add.reduceat(table["repeat_count"].to_numpy(zero_copy_only=False), first)
    column = TRAFFIC.get_field_index("repeat_count")
    merged = table.take(pa.array(first))
    return merged.set_column(
        column, TRAFFIC.field(column), pa.array(repeats.astype(np.int32), pa.int32())
    )
