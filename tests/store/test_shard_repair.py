"""A folder of features holds what is published, and no file that can never be published."""

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from store.features import features_row, open_shard
from store.schemas import features_schema
from store.shard_repair import mend, publish
from store.shards import shard_paths, write_shard

SCHEMA = features_schema("t", [1, 5], 16)


def opened(path):
    return open_shard(path, "t", [1, 5], 16)


def shard(folder, name, *samples):
    rows = [features_row(sample, range(7), torch.randn(7, 32).bfloat16()) for sample in samples]
    return write_shard(folder / f"{name}.parquet", pa.Table.from_pylist(rows, schema=SCHEMA))


def test_shards_whose_samples_are_all_published_do_not_stay_for_ever(tmp_path):
    publish(tmp_path, [shard(tmp_path, "one", "a", "b", "c")], {})
    shard(tmp_path, "again", "a", "b")
    shard(tmp_path, "overlap", "c", "d")
    shard(tmp_path, "new", "e")
    assert mend(tmp_path, opened).adopted == 1
    assert {path.stem for path in shard_paths(tmp_path)} == {"one", "new"}
    assert {path.stem for path in tmp_path.glob("*.parquet")} == {"one", "new", "overlap"}
    assert sum(pq.read_metadata(path).num_rows for path in shard_paths(tmp_path)) == 4
