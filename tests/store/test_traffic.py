"""One row per sample, in an order that logs cannot change."""

from datetime import UTC, datetime

import pyarrow as pa

from store.schemas import TRAFFIC
from store.shards import write_manifest, write_shard
from store.traffic import read_traffic


def row(sample, second=0, repeats=1, split="train", target="t"):
    return dict.fromkeys(TRAFFIC.names) | {
        "sample_id": sample,
        "captured_at": datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC),
        "conversation_id": f"c{second}",
        "repeat_count": repeats,
        "split": split,
        "target_id": target,
        "output_ids": [1],
        "loss_mask": [{"start": 0, "end": 1}],
    }


def publish(folder, key, rows):
    table = pa.Table.from_pylist(rows, schema=TRAFFIC)
    write_manifest(folder, key, [write_shard(folder / f"{key}.parquet", table)], {})


def test_repeats_across_shards_are_merged_and_the_earliest_row_stays(tmp_path):
    publish(tmp_path, "a", [row("x", 5, 2, "test"), row("y", 1)])
    publish(tmp_path, "b", [row("x", 3, 4, "train")])
    table = read_traffic(tmp_path)
    assert table.schema == TRAFFIC
    assert table["sample_id"].to_pylist() == ["x", "y"]
    assert table["repeat_count"].to_pylist() == [6, 1]
    assert table["conversation_id"].to_pylist() == ["c3", "c1"]
    assert read_traffic(tmp_path, split="test").num_rows == 0


def test_selection_by_target(tmp_path):
    publish(tmp_path, "a", [row("x"), row("z", target="other")])
    assert read_traffic(tmp_path, target_id="t")["sample_id"].to_pylist() == ["x"]


def test_nothing_published(tmp_path):
    assert read_traffic(tmp_path / "none", "t", "train").schema == TRAFFIC
