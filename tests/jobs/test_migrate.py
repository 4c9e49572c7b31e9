"""flywheel migrate: everything of a former work folder is found again, once."""

import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from jobs import gc, harvest, migrate, select
from jobs.base import cli
from jobs.base.config import Config, load
from jobs.dataset.samples import selected
from jobs.training.runs import learned
from jobs.upkeep.pins import kept_versions, unfinished_samples
from store import promotions
from store.feature_index import index_of
from store.former_layout import is_former
from store.ids import prompt_id, short_hash
from store.place import Place
from store.schemas import ACCEPTANCE, REJECTS, SET_ASIDE, TABLES, TRAFFIC
from store.tables import Table
from tests.helpers.former import make_former, write_acceptance, write_log, write_set_aside
from tests.helpers.work import configure

AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def traffic(log: str, *numbers: int) -> pa.Table:
    made = {"captured_at": AT, "log": log, "repeat_count": 2, "temperature": 0.7, "domain": "a"}
    rows = [
        made
        | {"sample_id": f"s{n}", "prompt_ids": [n, 2], "output_ids": [3, 4, n], "shaped": ""}
        | {"loss_mask": [{"start": 2, "end": 5}], "prompt_tokens": 2, "output_tokens": 3}
        | {"prompt_id": prompt_id([n, 2])}
        for n in numbers
    ]
    return pa.Table.from_pylist(rows, schema=TRAFFIC)


def rejects(log: str, *offsets: int) -> pa.Table:
    rows = [
        {"log": log, "file": "f", "offset": o, "reason": "cut", "raw": b"\xff{"} for o in offsets
    ]
    return pa.Table.from_pylist(rows, schema=REJECTS)


def acceptance(inputs: dict, *accepted: int) -> pa.Table:
    made = {"origin": "replay", "k": 3, "started_at": AT, "repeat_count": 1}
    made |= {"batch": short_hash(inputs), "drafted": [3, 255]}
    rows = [made | {"request_id": f"r{n}", "accepted": [n, 1]} for n in accepted]
    return pa.Table.from_pylist(rows, schema=ACCEPTANCE)


EVALUATED, SERVED = ({"drafter_version": "d", "origin": one} for one in ("replay", "served"))
ASIDE = pa.Table.from_pylist(
    [{"sample_id": "s1", "features_key": "k", "reason": "nan", "found_at": AT}], schema=SET_ASIDE
)
PIN = {"train": [["s1", "a", 0.0, [[2, 5]]], ["s2", "a", 0.5, []]], "val": [["s3", "b", 0.0, []]]}


@pytest.fixture
def cfg(tmp_path) -> Config:
    """A former folder of two logs, one of which has grown, and one of everything else."""
    work = tmp_path / "work"
    write_log(work, "short", traffic("short", 1), rejects("short", 1))
    write_log(work, "grown", traffic("grown", 1, 2), rejects("grown", 1, 9), replaces=["short"])
    os.remove(work / "rejects" / "manifests" / "short.json")
    write_log(work, "other", traffic("other", 3), rejects("other"))
    former = write_acceptance(work, EVALUATED, acceptance(EVALUATED, 1, 2))
    write_acceptance(work, EVALUATED, acceptance(EVALUATED, 3), replaces=[former])
    write_acceptance(work, SERVED, acceptance(SERVED, 0, 2))
    write_set_aside(work, ASIDE)
    for number, action in ((1, "refuse"), (2, "promote")):
        record = {"number": number, "decided_at": AT.isoformat(), "action": action, "who": "me"}
        (work / "promotions").mkdir(exist_ok=True)
        text = json.dumps(record | {"evidence": {"tau": 2.5}})
        (work / "promotions" / f"{number:06d}.json").write_text(text)
    (work / "runs" / "drafter-1").mkdir(parents=True)
    (work / "runs" / "drafter-1" / "pin-abc.json").write_text(json.dumps(PIN | {"files": []}))
    return load(None, [f"work={work}"])


def rows_of(cfg: Config, name: str, column: str) -> list[dict]:
    return cfg.table(name).read().sort_by(column).to_pylist()


def check(cfg: Config) -> None:
    """Everything that `cfg` had is where it belongs."""
    expected = pa.concat_tables([traffic("grown", 1, 2), traffic("other", 3)])
    assert rows_of(cfg, "traffic", "sample_id") == expected.to_pylist()
    assert rows_of(cfg, "rejects", "offset") == rejects("grown", 1, 9).to_pylist()
    logs = rows_of(cfg, "logs", "log")
    assert [(row["log"], row["path"]) for row in logs] == [
        ("grown", "/logs/grown.jsonl"),
        ("other", "/logs/other.jsonl"),
    ]
    assert logs[0]["reading"] == 3
    assert logs[0]["target_id"] == "t"
    assert json.loads(logs[0]["counts"]) == {"records": 4, "accepted": 2}
    assert json.loads(logs[0]["examples"]) == {"cut": "grown:0"}
    made = pa.concat_tables([acceptance(SERVED, 0, 2), acceptance(EVALUATED, 3)])
    assert rows_of(cfg, "acceptance", "request_id") == made.sort_by("request_id").to_pylist()
    assert rows_of(cfg, "set_aside", "sample_id") == ASIDE.to_pylist()
    decided = promotions.read(cfg.table("promotions"))
    assert [(row["number"], row["action"], row["evidence"]) for row in decided] == [
        (1, "refuse", {"tau": 2.5}),
        (2, "promote", {"tau": 2.5}),
    ]
    assert decided[0]["decided_at"] == AT
    assert learned(cfg, "drafter-1") == {"s1", "s2"}


def test_every_row_is_in_its_table(cfg, capsys):
    done = migrate.run(cfg)
    assert done["rows"] == {
        "rejects": 2,
        "set_aside": 1,
        "acceptance": 3,
        "promotions": 2,
        "feature_index": 0,
        "training pins": 1,
        "traffic": 3,
    }
    check(cfg)
    assert "next: `flywheel select`" in capsys.readouterr().err
    versions = {name: cfg.table(name).version() for name in TABLES}
    assert migrate.run(cfg)["rows"]["traffic"] == 0, "there is nothing left to do"
    assert {name: cfg.table(name).version() for name in TABLES} == versions
    check(cfg)


def test_former_files_are_left_to_gc(cfg):
    migrate.run(cfg)
    before = {p for name in TABLES for p in cfg.place(name).path.glob("*.parquet")}
    for path in before:
        os.utime(path, (1, 1))
    assert gc.run(cfg)["files"] == 10
    check(cfg)
    assert not list(cfg.place("traffic").path.glob("grown*"))
    assert kept_versions(cfg) == {}
    assert unfinished_samples(cfg).to_pylist() == [], "a former run cannot go on"


class Killed(BaseException):
    """As a signal: nothing catches it."""


def test_killed_anywhere_it_begins_anew(cfg, monkeypatch):
    """It is stopped at its first write or move, at its second ... until it comes through."""
    writes, stop = 0, 0
    real = {"write": Place.write, "commit": Table.replace, "move": os.replace}

    def counted(name: str):
        def call(*args, **more):
            nonlocal writes
            if "/leases/" not in str(args[0]):  # this process lives on: it must let go of it
                writes += 1
                if writes == stop:
                    raise Killed
            return real[name](*args, **more)

        return call

    monkeypatch.setattr("store.place.Place.write", counted("write"))
    monkeypatch.setattr("store.tables.Table.replace", counted("commit"))
    monkeypatch.setattr("jobs.migrate.os.replace", counted("move"))
    for stop in range(1, 100):  # noqa: B007 (read by `call`)
        writes = 0
        try:
            migrate.run(cfg)
        except Killed:
            continue
        break
    assert 15 < stop < 99
    check(cfg)


def roll_back(cfg: Config, *records: str) -> None:
    """As docs/explanation/data.md says, with those records of former/ that match."""
    work, kept = cfg.place().path, cfg.place(migrate.KEPT).path
    for path in [path for pattern in records for path in kept.glob(pattern)]:
        shutil.move(path, work / path.relative_to(kept))
    for path in [*work.rglob("_delta_log")]:
        shutil.rmtree(path)


LISTS = "*/manifests", "features/*/manifests"


@pytest.mark.parametrize("records", [LISTS, (*LISTS, "promotions/*.json", "runs/*/pin-*.json")])
def test_after_a_rollback_it_copies_again(cfg, records):
    """Also where only the lists of shards were moved back: the rest is found in former/."""
    first = migrate.run(cfg)
    roll_back(cfg, *records)
    assert is_former(cfg.place().path)
    assert migrate.run(cfg) == first
    check(cfg)
    assert not is_former(cfg.place().path)


def test_a_list_that_was_copied_back_is_not_overwritten(cfg):
    migrate.run(cfg)
    work, kept = cfg.place().path, cfg.place(migrate.KEPT).path
    roll_back(cfg, "traffic/manifests", "rejects/manifests")
    shutil.copytree(work / "rejects" / "manifests", kept / "rejects" / "manifests")
    with pytest.raises(ValueError, match="rejects/manifests: remove the older one, then run this"):
        migrate.run(cfg)


def test_stages_say_what_to_do(cfg, capsys):
    assert cli.main(["select", f"work={cfg.work}"]) == 2
    assert "layout of an earlier release: run `flywheel migrate`" in capsys.readouterr().err
    assert cli.main(["migrate", f"work={cfg.work}"]) == 0
    cli.main(["gc", f"work={cfg.work}"])
    assert "earlier release" not in capsys.readouterr().err


def test_a_damaged_shard_stops_it_before_anything_is_moved(cfg):
    (cfg.place("traffic").path / "other-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        ValueError, match=r"other-00000\.parquet: cannot be read .* backup, or remove"
    ):
        migrate.run(cfg)
    assert (cfg.place("traffic").path / "manifests").is_dir()


def test_a_bucket_has_no_former_layout():
    with pytest.raises(ValueError, match="is in a bucket"):
        migrate.run(load(None, ["work=s3://bucket/run"]))


def test_nothing_is_harvested_again(harvested, tmp_path):
    old, work = configure(harvested), tmp_path / "work"
    make_former(old, work)
    cfg = configure(work)
    migrate.run(cfg)
    select.run(cfg)
    ids = selected(old)["sample_id"].to_pylist()
    assert selected(cfg)["sample_id"].to_pylist() == ids
    (key,) = cfg.place("features").folders()
    columns = ["sample_id", "n_tokens", "file", "row_group"]
    assert (
        index_of(cfg.table("feature_index"), key)
        .select(columns)
        .equals(index_of(old.table("feature_index"), key).select(columns))
    )
    done = harvest.run(cfg)
    assert (done["samples"], done["reused"]) == (0, len(ids))
    assert sorted(p.name for p in (work / "features" / key).iterdir()) == sorted(
        p.name for p in Path(old.place("features", key).path).glob("*.parquet")
    )
