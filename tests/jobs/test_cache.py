"""flywheel cache: what is needed stays, then age and size decide."""

import json
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash.identity import target_id
from jobs import cache
from jobs.base.config import Config, load
from jobs.dataset.samples import features_place
from store.feature_index import index_of
from store.lease import lease
from store.schemas import FEATURE_INDEX, SELECTION
from tests.helpers.tiny import make_target

NOW = datetime.now(UTC)
MIB = 1 / 1024


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def cfg(work_url, tmp_path, target) -> Config:
    settings = [f"work={work_url}", f"scratch={tmp_path / 'scratch'}", f"target.path={target}"]
    return load(None, [*settings, "drafter.num_taps=3"])


def add(cfg: Config, key: str, file: str, days_old: float, *samples: str) -> list[dict]:
    """A file of one MiB with these samples; returns its rows of the index."""
    cfg.place("features", key).write(file, b"0" * 2**20)
    made = {"features_key": key, "file": file, "file_bytes": 2**20, "n_tokens": 3, "row_group": 0}
    at = {"harvested_at": NOW - timedelta(days=days_old)}
    return [made | at | {"sample_id": sample} for sample in samples]


def select(cfg: Config, *samples: str) -> None:
    rows = [{"sample_id": name, "target_id": target_id(cfg.target_path)} for name in samples]
    shard = cfg.table("selection").write(pa.Table.from_pylist(rows, schema=SELECTION))
    cfg.table("selection").replace("target_id", [target_id(cfg.target_path)], [shard])


def pin(cfg: Config, run: str, *samples: str) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"sample_id": list(samples)}), sink)
    cfg.place("runs", run).write("pin-abc.parquet", sink.getvalue().to_pybytes())


def files(cfg: Config) -> set[str]:
    return {found.name.partition("/")[2] for found in cfg.place("features").objects()}


@pytest.fixture
def filled(cfg) -> Config:
    """Six files: two of the selection, one of an unfinished run, three that nobody needs."""
    key = features_place(cfg).name
    rows = [
        *add(cfg, key, "selected-old.parquet", 90, "s1", "x1"),
        *add(cfg, key, "selected-new.parquet", 1, "s2"),
        *add(cfg, key, "free-new.parquet", 2, "x2"),
        *add(cfg, key, "free-old.parquet", 60, "x3"),
        *add(cfg, "other", "other-taps.parquet", 40, "s1", "s2"),
        *add(cfg, "other", "pinned.parquet", 80, "p1"),
    ]
    cfg.table("feature_index").append(pa.Table.from_pylist(rows, schema=FEATURE_INDEX))
    select(cfg, "s1", "s2")
    pin(cfg, "drafter-1", "p1")
    pin(cfg, "drafter-2", "x3")
    cfg.place("runs", "drafter-2").write("result.json", json.dumps({"error": "e"}).encode())
    return cfg


def test_without_limits_everything_stays(filled):
    done = cache.run(filled)
    assert (done["files"], done["evicted"], done["needed"]) == (6, 0, 3 * 2**20)
    assert len(files(filled)) == 6


def test_expired_features_go_unless_they_are_needed(filled):
    cfg = filled.override("cache", days=30.0)
    assert cache.plan(cfg)["evicted"] == 2
    assert len(files(cfg)) == 6, "--plan changes nothing"
    assert cache.run(cfg)["evicted"] == 2
    assert files(cfg) == {
        f"{n}.parquet" for n in ("selected-old", "selected-new", "free-new", "pinned")
    }
    key = features_place(cfg).name
    assert index_of(cfg.table("feature_index"), key)["sample_id"].to_pylist() == [
        "s1",
        "s2",
        "x1",
        "x2",
    ]


def test_the_oldest_go_until_the_rest_fits(filled):
    cfg = filled.override("cache", gib=5 * MIB)
    assert cache.run(cfg)["evicted"] == 1
    assert "free-old.parquet" not in files(cfg)
    assert cache.run(filled.override("cache", gib=4 * MIB))["evicted"] == 1
    assert "other-taps.parquet" not in files(cfg)


def test_expired_ones_count_towards_the_size(filled):
    cfg = filled.override("cache", gib=4 * MIB, days=30.0)
    assert cache.run(cfg)["evicted"] == 2
    assert "free-new.parquet" in files(cfg)


def test_what_is_needed_may_exceed_the_size(filled, capsys):
    done = cache.run(filled.override("cache", gib=2 * MIB))
    assert (done["files"], done["bytes"]) == (3, 3 * 2**20)
    assert "need 0.00293 GiB, more than cache.gib=0.00195312: raise it" in capsys.readouterr().err
    assert files(filled) == {f"{n}.parquet" for n in ("selected-old", "selected-new", "pinned")}


def test_it_waits_for_a_harvest(filled, monkeypatch):
    cfg = filled.override("cache", days=30.0)
    key = features_place(cfg).name
    monkeypatch.setattr(cache, "WAIT", 0.1)
    with (
        lease(cfg.place("leases", f"harvest-{key}")),
        pytest.raises(ValueError, match=r"harvest-.* is held by .* wait for it to end"),
    ):
        cache.run(cfg)
    assert "free-old.parquet" in files(cfg)
    assert cache.run(cfg)["evicted"] == 2


def test_what_is_selected_while_it_waits_stays(filled, monkeypatch):
    """A select and a harvest, which reuses the features, may end before cache gets its lease."""
    cfg = filled.override("cache", days=30.0)
    waited = []

    @contextmanager
    def after_a_harvest(place, *more, **named):
        if waited == ["cache"]:  # the first lease of a harvest
            select(cfg, "x3")
        waited.append(place.name)
        with lease(place, *more, **named) as held:
            yield held

    monkeypatch.setattr(cache, "lease", after_a_harvest)
    done = cache.run(cfg)
    assert {f"harvest-{features_place(cfg).name}", "harvest-other"} <= set(waited)
    assert "free-old.parquet" in files(cfg)
    listed = index_of(cfg.table("feature_index"), features_place(cfg).name)
    assert "x3" in listed["sample_id"].to_pylist()
    assert (done["evicted"], done["files"]) == (6 - len(files(cfg)), len(files(cfg)))
    assert done["bytes"] == len(files(cfg)) * 2**20


def test_an_empty_folder(cfg):
    assert cache.run(cfg.override("cache", gib=1.0))["files"] == 0
