"""flywheel gc: what goes, what stays, and that nobody who reads or writes meanwhile notices."""

import json
import os
import threading
import time
from datetime import UTC, datetime
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import gc
from jobs.base.config import Config, load
from jobs.training.runs import VERSIONS
from jobs.upkeep.garbage import heaps
from store.collect import compact
from store.lease import Lost, lease
from store.schemas import FEATURE_INDEX, TRAFFIC
from store.tables import Table

AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


@pytest.fixture
def cfg(work_url, tmp_path) -> Config:
    return load(None, [f"work={work_url}", f"scratch={tmp_path / 'scratch'}"])


def rows(log: str, count: int = 2, **more) -> pa.Table:
    """TRAFFIC rows of one log, with values at the edges of their types and nulls."""
    found = [
        {"sample_id": f"{log}-{i}", "log": log, "captured_at": AT, "prompt_ids": [i, 2**31 - 1]}
        | {"output_ids": [0] * i, "loss_mask": [{"start": 2, "end": 3}], "temperature": 0.7}
        | {"domain": "\N{SNOWMAN}" * 70, "prompt_tokens": 2, "thinking": True, "top_p": None}
        | more
        for i in range(count)
    ]
    return pa.Table.from_pylist(found, schema=TRAFFIC)


def sorted_rows(table: Table, version: int | None = None) -> list[dict]:
    return table.read(version=version).sort_by("sample_id").to_pylist()


def pin(cfg: Config, run: str, **versions: int) -> None:
    metadata = {VERSIONS: json.dumps(versions).encode()}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"sample_id": ["s"]}).replace_schema_metadata(metadata), sink)
    cfg.place("runs", run).write("pin-abc.parquet", sink.getvalue().to_pybytes())


def names(cfg: Config, folder: str) -> set[str]:
    found = {one.name for one in cfg.place(folder).objects()}
    return {name for name in found if not name.startswith("_delta_log")}


def age(cfg: Config, days: float) -> None:
    """Make every file of a local work folder this old."""
    then = time.time() - 86400 * days
    for path in cfg.place().path.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


def now_days(cfg: Config, days: int) -> Config:
    return cfg.override("gc", days=days)


def test_versions_that_nobody_is_pinned_to_go(cfg):
    table, cfg = cfg.table("traffic"), now_days(cfg, 0)
    first = table.append(rows("a"))
    second = table.replace("log", ["a"], [table.write(rows("a", 3))])
    table.replace("log", ["a"], [table.write(rows("a", 4))])
    pin(cfg, "drafter-1", traffic=second, selection=1)
    unpublished = table.write(rows("b"))
    before, pinned = sorted_rows(table), sorted_rows(table, second)
    planned = gc.plan(cfg)
    assert len(names(cfg, "traffic")) == 4, "--plan removes nothing"
    done = gc.run(cfg)
    assert (done["files"], done["bytes"]) == (planned["files"], planned["bytes"])
    assert done["files"] == 2
    assert names(cfg, "traffic") == {*table.shards(), *table.shards(second)}
    assert unpublished.name not in names(cfg, "traffic")
    assert (sorted_rows(table), sorted_rows(table, second)) == (before, pinned)
    with pytest.raises(FileNotFoundError, match=r"old version that `flywheel gc` has collected"):
        table.read(version=first)
    assert gc.run(cfg)["files"] == 0


def test_a_damaged_pin_stops_it(cfg):
    cfg.table("traffic").append(rows("a"))
    cfg.place("runs", "drafter-1").write("pin-abc.parquet", b"damaged")
    with pytest.raises(ValueError, match=r"pin-abc\.parquet is damaged .* move the run's folder"):
        gc.run(cfg)


def test_days_of_zero_need_a_quiet_folder(cfg):
    with (
        lease(cfg.place("leases", "ingest")),
        pytest.raises(ValueError, match=r"gc\.days=0 .* ingest \(.*process .*wait"),
    ):
        gc.run(now_days(cfg, 0))
    gc.run(now_days(cfg, 0))
    with lease(cfg.place("leases", "ingest")):
        gc.run(now_days(cfg, 1))


def test_what_is_young_stays(cfg):
    table = cfg.table("traffic")
    table.append(rows("a"))
    table.replace("log", ["a"], [table.write(rows("a", 3))])
    table.write(rows("b"))
    cfg.place("features", "k").write("new.parquet", b"new")
    cfg.place("ingesting").write("log.json", b"{}")
    before = names(cfg, "")
    assert gc.run(cfg)["files"] == 0
    assert {n for n in names(cfg, "") if not n.startswith("leases")} == before


@pytest.mark.parametrize("work_url", ["local"], indirect=True)
def test_age_counts_from_when_a_file_left_its_table(cfg):
    table = cfg.table("traffic")
    table.append(rows("a"))
    age(cfg, 30)
    table.replace("log", ["a"], [table.write(rows("a", 3))])
    assert gc.run(cfg)["files"] == 0, "the replaced shard is old, but left just now"
    table.write(rows("b"))
    age(cfg, 30)
    assert gc.run(cfg)["files"] == 1, "of what never was in a table, the file's time counts"


@pytest.mark.parametrize("work_url", ["local"], indirect=True)
def test_old_leftovers_go(cfg):
    (path := cfg.place("traffic").path).mkdir(parents=True)
    (path / "0123.parquet#1").write_bytes(b"cut")
    cfg.place("ingesting").write("log.json", b"{}")
    cfg.place("features", "k").write("unlisted.parquet", b"some")
    cfg.place("features", "k").write(".damaged/unlisted.parquet", b"")
    scratch = cfg.path("training_data")
    (scratch / "x").mkdir(parents=True)
    (scratch / "tokens-1.arrow").write_bytes(b"old")
    age(cfg, 8)
    os.utime(scratch / "tokens-1.arrow", (1, 1))
    assert gc.plan(cfg)["files"] == 4
    assert gc.run(cfg)["files"] == 4
    assert names(cfg, "features/k") == {".damaged/unlisted.parquet"}
    assert not list(path.glob("*#1"))
    assert not (scratch / "tokens-1.arrow").exists()


@pytest.mark.parametrize("work_url", ["local"], indirect=True)
def test_a_fetched_folder_goes_as_a_whole(cfg):
    fetched = cfg.path("fetched")
    for name in ("old/config.json", ".old.json", "used/config.json", ".used.json"):
        (fetched / name).parent.mkdir(parents=True, exist_ok=True)
        (fetched / name).write_bytes(b"{}")
        os.utime(fetched / name, (1, 1))
    os.utime(fetched / ".used.json")
    gc.run(cfg)
    left = {p.relative_to(fetched).as_posix() for p in fetched.rglob("*") if p.is_file()}
    assert left == {"used/config.json", ".used.json"}


def listed(cfg: Config, *files: str) -> pa.Table:
    made = {"features_key": "k", "n_tokens": 3, "row_group": 0, "file_bytes": 4, "harvested_at": AT}
    found = [made | {"sample_id": f"s-{name}", "file": name} for name in files]
    return pa.Table.from_pylist(found, schema=FEATURE_INDEX)


def test_features_that_no_kept_version_lists_go(cfg):
    place, index = cfg.place("features", "k"), cfg.table("feature_index")
    for name in ("a", "b", "c", "d"):
        place.write(f"{name}.parquet", b"some")
    index.append(listed(cfg, "a.parquet", "b.parquet"))
    second = index.replace("file", ["b.parquet"], [index.write(listed(cfg, "c.parquet"))])
    index.replace("file", ["c.parquet"], [])
    pin(cfg, "drafter-1", feature_index=second)
    gc.run(now_days(cfg, 0))
    assert names(cfg, "features/k") == {"a.parquet", "c.parquet"}


def test_what_was_written_again_stays(cfg):
    cfg = now_days(cfg, 0)
    table = cfg.table("traffic")
    table.append(rows("b"))
    shard = table.write(rows("a"))
    heap = next(heap for heap in heaps(cfg, {}) if heap.place == table.place)
    found = heap.find()
    assert [one.name for one in found] == [shard.name]
    time.sleep(1.1)  # S3 tells whole seconds
    table.append(rows("a"))
    heap.remove(found)
    assert len(sorted_rows(table)) == 4


@pytest.mark.parametrize("work_url", ["local"], indirect=True)
def test_shards_of_an_ingest_at_work_stay(cfg, monkeypatch):
    cfg.table("traffic").append(rows("a"))
    cfg.table("traffic").write(rows("b"))
    age(cfg, 8)
    monkeypatch.setattr("jobs.upkeep.garbage.WAIT", 0.0)
    with lease(cfg.place("leases", "ingest")):
        done = gc.run(cfg)
        assert len(done["left"]) == 1
        assert "ingest is held by" in done["left"][0]
        assert len(names(cfg, "traffic")) == 2
    assert gc.run(cfg)["left"] == []
    assert len(names(cfg, "traffic")) == 1


@pytest.mark.parametrize("work_url", ["local"], indirect=True)
def test_a_marker_stays_while_only_it_knows_whose_rows_are_in_a_table(cfg):
    """Killed between the commit of traffic and that of logs: when the log grows, its rows go."""
    cfg.table("traffic").append(rows("0123"))
    for name in ("0123.json", "4567.json"):
        cfg.place("ingesting").write(name, b"{}")
    age(cfg, 8)
    gc.run(cfg)
    assert names(cfg, "ingesting") == {"0123.json"}


@pytest.mark.parametrize("work_url", ["local"], indirect=True)
def test_nothing_is_removed_under_a_lease_that_has_ended(cfg, monkeypatch):
    cfg.table("traffic").append(rows("a"))
    cfg.table("traffic").write(rows("b"))
    age(cfg, 8)
    heap = next(one for one in heaps(cfg, {}) if one.place == cfg.table("traffic").place)
    found = heap.find()
    monkeypatch.setattr("jobs.upkeep.garbage.lease", partial(lease, seconds=0.0))
    with pytest.raises(Lost):
        heap.remove(found)
    assert len(names(cfg, "traffic")) == 2


def test_small_shards_are_put_together_beside_a_busy_writer(cfg, monkeypatch):
    """What others add does not matter; what they take away is left for the next gc."""
    table, real = cfg.table("traffic"), Table.write
    for i in range(18):
        table.append(rows(f"log{i:02}"))

    def write(one, found):
        monkeypatch.setattr(Table, "write", real)
        table.append(rows("more"))
        monkeypatch.setattr(Table, "write", write)
        return real(one, found)

    monkeypatch.setattr(Table, "write", write)
    assert compact(table)
    monkeypatch.setattr(Table, "write", real)
    assert len(table.shards()) == 2
    assert table.read().num_rows == 38


def test_small_shards_are_put_together(cfg):
    table = cfg.table("traffic")
    for i in range(20):
        table.append(rows(f"log{i:02}"))
    before, version = sorted_rows(table), table.version()
    before_rows = pa.Table.from_pylist(before, schema=TRAFFIC)
    assert gc.plan(cfg)["small"] == {str(table.place): 20}
    assert table.version() == version
    gc.run(cfg)
    (shard,) = table.shards().values()
    assert (shard.low["log"], shard.high["log"]) == ("log00", "log19")
    assert {*shard.low} == {*table.write(before_rows).low}, "bounds of the same columns"
    assert sorted_rows(table) == before == sorted_rows(table, version)
    assert table.read().schema == TRAFFIC
    table.replace("log", ["log03", "log19"], [table.write(rows("log19", 1))])
    expected = [row for row in before if row["log"] not in ("log03", "log19")]
    assert sorted_rows(table) == [*expected, *rows("log19", 1).to_pylist()]
    assert gc.run(cfg)["small"] == {}


def test_neither_a_reader_nor_a_writer_notices(cfg):
    table, ends = cfg.table("traffic"), threading.Event()
    for i in range(18):
        table.append(rows(f"log{i:02}"))
    counts, errors = [], []

    def read() -> None:
        while not ends.is_set():
            try:
                counts.append(len(table.read(["sample_id"])))
            except OSError as error:
                errors.append(error)

    def write() -> None:
        for i in range(6):
            table.replace("log", [f"log{i:02}"], [table.write(rows(f"log{i:02}", top_k=i))])

    threads = [threading.Thread(target=read), threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        gc.run(now_days(cfg, 1))
    threads[1].join()
    gc.run(now_days(cfg, 1))
    ends.set()
    threads[0].join()
    assert errors == []
    assert set(counts) == {36}
    assert [row["top_k"] for row in sorted_rows(table)][:12] == [i for i in range(6) for _ in "ab"]
