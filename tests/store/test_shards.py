"""The commit protocol: nothing half-written is ever visible, reruns find what is done."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from store import files
from store.files import commit, sweep
from store.schemas import ACCEPTANCE, FEATURES, REJECTS, TRAFFIC, count_tokens
from store.shards import (
    is_complete,
    read_dataset,
    read_manifests,
    shard_info,
    shard_paths,
    write_manifest,
    write_shard,
)
from tests.helpers.shards import verify


def rejects(n, reason="cut_line"):
    rows = [{"file": "a", "offset": i, "reason": reason, "raw": b"x"} for i in range(n)]
    return pa.Table.from_pylist(rows, schema=REJECTS)


def publish(folder, key, table, **kwargs):
    shard = write_shard(folder / f"{key}.parquet", table)
    return write_manifest(folder, key, [shard], {"from": key}, **kwargs)


@pytest.mark.parametrize("schema", [TRAFFIC, FEATURES, ACCEPTANCE, REJECTS])
def test_empty_folder_gives_typed_empty_table(tmp_path, schema):
    assert read_dataset(tmp_path / "nothing", schema).schema == schema


def test_column_all_null_or_empty_keeps_its_type(tmp_path):
    row = dict.fromkeys(TRAFFIC.names) | {"sample_id": "s", "output_ids": [], "loss_mask": []}
    publish(tmp_path, "nulls", pa.Table.from_pylist([row], schema=TRAFFIC))
    row |= {"output_ids": [5], "loss_mask": [{"start": 0, "end": 1}], "domain": "d"}
    publish(tmp_path, "values", pa.Table.from_pylist([row], schema=TRAFFIC))
    table = read_dataset(tmp_path, TRAFFIC)
    assert table.schema == TRAFFIC
    assert table["output_ids"].to_pylist() == [[], [5]]


def test_round_trip_with_columns_and_filter(tmp_path):
    publish(tmp_path, "a", rejects(3))
    publish(tmp_path, "b", rejects(2, "other"))
    table = read_dataset(tmp_path, REJECTS, ["offset"], pc.field("reason") == "other")
    assert table.to_pydict() == {"offset": [0, 1]}
    assert verify(tmp_path) == 2


def test_tokens_are_counted_and_survive_in_the_footer(tmp_path):
    row = dict.fromkeys(TRAFFIC.names) | {"prompt_ids": [1, 2, 3], "output_ids": [4]}
    table = pa.Table.from_pylist([row, row], schema=TRAFFIC)
    assert count_tokens(table) == 8
    write_shard(tmp_path / "t.parquet", table)
    info = shard_info(tmp_path / "t.parquet")
    assert (info.rows, info.tokens) == (2, 8)


def test_shard_bytes_are_deterministic(tmp_path):
    first = write_shard(tmp_path / "a.parquet", rejects(100))
    second = write_shard(tmp_path / "b.parquet", rejects(100))
    assert first.sha256 == second.sha256


def test_unlisted_truncated_and_hidden_files_are_not_read(tmp_path):
    publish(tmp_path, "good", rejects(2))
    (tmp_path / "empty.parquet").touch()
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "good.parquet").read_bytes()[:-9])
    (tmp_path / ".good.parquet.aa.tmp").write_bytes(b"PAR1")
    assert read_dataset(tmp_path, REJECTS).num_rows == 2
    assert not is_complete(tmp_path / "empty.parquet")
    assert not is_complete(tmp_path / "cut.parquet")
    with pytest.raises(ValueError, match=r"cut\.parquet: not a complete"):
        shard_info(tmp_path / "cut.parquet")


def test_shards_from_before_a_column_was_added_are_read_as_null(tmp_path):
    row = dict.fromkeys(TRAFFIC.names) | {"sample_id": "old", "output_ids": [], "loss_mask": []}
    old = pa.Table.from_pylist([row], schema=TRAFFIC).drop_columns(["language"])
    publish(tmp_path, "old", old)
    new = row | {"sample_id": "new", "language": "de"}
    publish(tmp_path, "new", pa.Table.from_pylist([new], schema=TRAFFIC))
    table = read_dataset(tmp_path, TRAFFIC)
    assert table.schema == TRAFFIC
    found = dict(zip(*(table[name].to_pylist() for name in ("sample_id", "language")), strict=True))
    assert found == {"old": None, "new": "de"}
    assert read_dataset(tmp_path, TRAFFIC, columns=["sample_id"]).column_names == ["sample_id"]
    publish(tmp_path, "foreign", old.drop_columns(["tenant"]))
    with pytest.raises(ValueError, match=r"foreign\.parquet: columns .* do not fit"):
        read_dataset(tmp_path, TRAFFIC)


def test_missing_damaged_and_foreign_files_are_named(tmp_path):
    publish(tmp_path, "good", rejects(2))
    path = tmp_path / "good.parquet"
    data = path.read_bytes()
    path.write_bytes(data[:40] + bytes([data[40] ^ 255]) + data[41:])
    with pytest.raises(ValueError, match=r"good\.parquet: contents differ"):
        verify(tmp_path)
    path.write_bytes(data[:-3])
    with pytest.raises(ValueError, match=r"good\.parquet.*manifest says"):
        read_dataset(tmp_path, REJECTS)
    path.unlink()
    with pytest.raises(ValueError, match=r"good\.parquet.*missing"):
        read_dataset(tmp_path, REJECTS)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"good\.parquet: columns .* do not fit"):
        read_dataset(tmp_path, TRAFFIC)


def test_broken_manifest_is_named(tmp_path):
    publish(tmp_path, "good", rejects(1))
    for text, why in (('{"key":', "Expecting"), ("{}", "it lacks files"), ("null", "an object")):
        (tmp_path / "manifests" / "good.json").write_text(text)
        with pytest.raises(ValueError, match=rf"good\.json is damaged \(.*{why}"):
            read_manifests(tmp_path)


def test_a_full_disk_is_named_with_the_file(tmp_path):
    def full(stream):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: '.*/a\.json'"):
        commit(tmp_path / "a.json", full)
    assert list(tmp_path.iterdir()) == []


def test_second_writer_of_a_manifest_gets_the_first(tmp_path):
    first = publish(tmp_path, "k", rejects(1), detail={"who": "first"})
    second = publish(tmp_path, "k", rejects(1), detail={"who": "second"})
    assert second == first
    assert len(read_manifests(tmp_path)) == 1
    assert not list(tmp_path.glob("manifests/.*"))


def test_replaced_manifests_are_not_read(tmp_path):
    publish(tmp_path, "short", rejects(1))
    publish(tmp_path, "long", rejects(3), replaces=["short"])
    assert [m["key"] for m in read_manifests(tmp_path)] == ["long"]
    assert [p.name for p in shard_paths(tmp_path)] == ["long.parquet"]
    assert read_dataset(tmp_path, REJECTS).num_rows == 3


def test_manifest_has_no_clock_and_no_absolute_path(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert publish(one, "k", rejects(2)) == publish(two, "k", rejects(2))
    assert str(tmp_path) not in (one / "manifests" / "k.json").read_text()


def test_failing_writer_leaves_nothing(tmp_path):
    def fail(stream):
        stream.write(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files.commit(tmp_path / "x.parquet", fail)
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys, pathlib
import pyarrow as pa
from store import files
from store.schemas import REJECTS
from store.shards import write_manifest, write_shard
folder = pathlib.Path(sys.argv[1])
rows = [{"file": "a", "offset": i, "reason": "r", "raw": bytes(64)} for i in range(2000)]
table = pa.Table.from_pylist(rows, schema=REJECTS)
print("go", flush=True)
for i in range(10_000):
    shard = write_shard(folder / f"{i:05d}.parquet", table)
    write_manifest(folder, f"{i:05d}", [shard], {"i": i})
"""


def start(code, *args):
    process = subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.parametrize("delay", [0.0, 0.011, 0.05, 0.13, 0.29])
def test_kill_9_never_leaves_a_half_written_file_at_a_final_name(tmp_path, delay):
    process = start(WRITER, str(tmp_path))
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for path in tmp_path.glob("[!.]*.parquet"):
        assert shard_info(path).rows == 2000
    listed = read_manifests(tmp_path)
    assert read_dataset(tmp_path, REJECTS).num_rows == 2000 * len(listed)
    assert verify(tmp_path) == len(listed)
    sweep(tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.suffix == ".tmp"]


HOLDER = """
import sys, pathlib, time
from store import files
def slow(stream):
    stream.write(b"half")
    print("go", flush=True)
    time.sleep(60)
files.commit(pathlib.Path(sys.argv[1]), slow)
"""


def test_sweep_keeps_a_live_writers_temporary_and_removes_a_dead_ones(tmp_path):
    process = start(HOLDER, str(tmp_path / "x.parquet"))
    assert sweep(tmp_path) == 0
    assert len(list(tmp_path.glob(".x.parquet.*"))) == 1
    process.kill()
    process.wait()
    assert sweep(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_two_racing_processes_publish_one_manifest(tmp_path):
    code = (
        "import sys, pathlib; from store.shards import write_manifest; print('go', flush=True)\n"
        "for i in range(200):\n"
        "    write_manifest(pathlib.Path(sys.argv[1]), f'{i}', [], {'who': sys.argv[2]})\n"
    )
    racers = [start(code, str(tmp_path), who) for who in "ab"]
    assert [r.wait() for r in racers] == [0, 0]
    paths = list(tmp_path.glob("manifests/*.json"))
    assert len(paths) == 200
    assert {json.loads(p.read_text())["inputs"]["who"] for p in paths} <= {"a", "b"}
