"""A shard of a narrow table: a Parquet object named after its bytes, and what is known of its rows.

What is known (bounds and nulls of each column) is in the commit that publishes a shard. A change
finds the shards that it touches by it, and a reader leaves out those that have nothing it wants.
"""

import hashlib
import json
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import obstore
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from store.place import Place

LONG = 500
"""Bytes of a text, on average, above which a column has neither dictionary nor statistics."""
ROW_GROUP_BYTES = 64 << 20
MAX_STATISTIC = 64
"""Most characters of a text in a shard's statistics."""
SOUGHT = {"sample_id", "target_id", "captured_at", "log", "features_key", "file", "drafter_version"}
"""Columns by which a scan leaves out shards. Bounds of all would cost 80 kB a shard."""
LAST_CHARACTER = "\U0010ffff"


@dataclass(frozen=True, slots=True)
class Shard:
    """A Parquet file of a table. By column: no value is below `low` or above `high`, and `nulls`
    rows have none. Of a column that they lack, nothing is known.
    """

    name: str
    bytes: int
    rows: int
    low: dict[str, Any]
    high: dict[str, Any]
    nulls: dict[str, int] = field(default_factory=dict)

    def has_only(self, column: str, values: Collection[Any]) -> bool:
        """Whether each row has the same value in this column, one of `values`."""
        low, high = self.low.get(column), self.high.get(column)
        same = low is not None and low == high and self.nulls.get(column) == 0
        return same and low in values

    def may_have(self, column: str, values: Collection[Any]) -> bool:
        """Whether a row may have one of `values` in this column."""
        if self.nulls.get(column) == self.rows:
            return False
        low, high = self.low.get(column), self.high.get(column)
        return low is None or high is None or any(low <= value <= high for value in values)

    def bounds(self, schema: pa.Schema) -> pc.Expression:
        """What is known of every row, for a scanner that leaves out shards."""
        known = pc.scalar(True)
        for name in self.low.keys() & self.high.keys() & SOUGHT & set(schema.names):
            kind, column = schema.field(name).type, pc.field(name)
            inside = column >= pa.scalar(self.low[name], kind)
            inside &= column <= pa.scalar(self.high[name], kind)
            known &= inside if self.nulls.get(name) == 0 else inside | column.is_null()
        return known


def write_shard(place: Place, rows: pa.Table, metadata: dict[str, str] | None = None) -> Shard:
    """Write rows as one Parquet object named after its bytes. If it is there already, it is written
    again: what was written a moment ago is safe from `flywheel gc`.

    zstd-1; dictionaries for strings only (tensor bytes do not repeat); row groups of about 64 MiB.
    """
    if metadata:
        rows = rows.replace_schema_metadata(metadata)
    texts = [f.name for f in rows.schema if pa.types.is_string(f.type)]
    # Long texts do not repeat, and nobody looks for a range of them.
    long = {name for name in texts if rows[name].nbytes > LONG * rows.num_rows}
    per_row = max(1, rows.nbytes // max(1, rows.num_rows))
    sink = pa.BufferOutputStream()
    pq.write_table(
        rows,
        sink,
        compression="zstd",
        compression_level=1,
        use_dictionary=[name for name in texts if name not in long],  # pyright: ignore[reportArgumentType]
        write_statistics=[n for n in rows.column_names if n not in long],  # pyright: ignore[reportArgumentType]
        row_group_size=max(1, ROW_GROUP_BYTES // per_row),
    )
    data = sink.getvalue()
    name = f"{hashlib.sha256(data).hexdigest()[:32]}.parquet"
    place.write(name, obstore.Bytes(memoryview(data).cast("B")))
    nulls = {column: rows[column].null_count for column in rows.column_names}
    return Shard(name, data.size, rows.num_rows, *_extremes(rows), nulls)


def file_has(place: Place, name: str, column: str, values: Collection[str]) -> bool:
    """Whether a file that no commit describes has a row with one of these texts in a column. False
    if it cannot be read.

    Bounds are not enough: a compaction at work has written a file that spans many values.
    """
    found = pc.field(column).isin([*values])
    try:
        return pq.read_table(place.open(name), columns=[column], filters=found).num_rows > 0
    except (OSError, ValueError):
        return False


def _extremes(rows: pa.Table) -> tuple[dict[str, Any], dict[str, Any]]:
    """A lower and an upper bound of each column that Delta Lake has statistics of.

    Readers of other make leave out shards that lack them, so each column has them in every shard,
    or in none. Long texts are cut, as the format allows.
    """
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    for column in rows.schema:
        if not (pa.types.is_string(column.type) or pa.types.is_primitive(column.type)):
            continue
        ends = pc.min_max(rows[column.name]).as_py()  # pyright: ignore[reportAttributeAccessIssue]
        least, most = ends["min"], ends["max"]
        if least is None or least != least:
            continue
        if isinstance(most, str) and len(most) > MAX_STATISTIC:
            most = max(most[:MAX_STATISTIC] + LAST_CHARACTER, most)
        low[column.name] = least[:MAX_STATISTIC] if isinstance(least, str) else least
        high[column.name] = most
    return low, high


def live_shards(table: DeltaTable) -> dict[str, Shard]:
    """The shards of the version that `table` is at, by name."""
    actions: Any = pa.table(table.get_add_actions(flatten=True))
    found = {}
    for row in actions.to_pylist():
        known = [
            {k.removeprefix(p): v for k, v in row.items() if k.startswith(p) and v is not None}
            for p in ("min.", "max.", "null_count.")
        ]
        found[row["path"]] = Shard(row["path"], row["size_bytes"], row["num_records"], *known)
    return found


def added(shard: Shard) -> AddAction:
    """The entry of a commit that adds a shard to the table."""
    ends = [{k: _plain(v) for k, v in side.items()} for side in (shard.low, shard.high)]
    stats = {"numRecords": shard.rows, "minValues": ends[0], "maxValues": ends[1]}
    stats["nullCount"] = shard.nulls
    now = int(time.time() * 1000)
    # The library reads escapes of characters from U+20000 on wrongly (1.6.6), hence none.
    text = json.dumps(stats, ensure_ascii=False)
    return AddAction(shard.name, shard.bytes, {}, now, True, text)


def removed(shard: Shard) -> RemoveAction:
    """The entry of a commit that takes a shard out of the table."""
    return RemoveAction(
        path=shard.name,
        data_change=True,
        deletion_timestamp=int(time.time() * 1000),
        partition_values={},
        size=shard.bytes,
    )


def _plain(value: Any) -> Any:
    """A statistic as Delta Lake's JSON has it."""
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return value
