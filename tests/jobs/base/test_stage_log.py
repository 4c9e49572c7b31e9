"""The table stages: one row per run, whatever came of it."""

import json
from datetime import UTC, datetime

import pytest

from jobs.base import stage_log
from jobs.base.config import load
from jobs.base.stage_log import LOGGED, logged, shortened


@pytest.fixture
def cfg(work_url):
    return load(None, [f"work={work_url}"])


def fail(error):
    def run(cfg):
        raise error

    return run


def rows(cfg):
    return cfg.table("stages").read().sort_by("started_at").to_pylist()


def test_what_ran_when_by_whom_and_what_came_of_it(cfg):
    before = datetime.now(UTC)
    assert logged(cfg, "gc", lambda cfg: {"stage": "gc", "deleted": 3}) == {
        "stage": "gc",
        "deleted": 3,
    }
    logged(cfg, "promote", lambda cfg: {"ok": False, "reasons": ["no"]})
    with pytest.raises(ValueError, match="bad"):
        logged(cfg, "train", fail(ValueError("bad thing: do this\nand a remote traceback")))
    found = rows(cfg)
    assert [(row["stage"], row["ok"]) for row in found] == [
        ("gc", True),
        ("promote", False),
        ("train", False),
    ]
    assert [json.loads(row["summary"]) for row in found] == [
        {"stage": "gc", "deleted": 3},
        {"ok": False, "reasons": ["no"]},
        {"error": "bad thing: do this"},
    ]
    assert all("@" in row["who"] for row in found)
    assert all(before <= row["started_at"] <= row["finished_at"] for row in found)


def test_what_changes_nothing_is_not_noted(cfg):
    for stage in ("report", "sql", "doctor", "serve"):
        assert stage not in LOGGED
        logged(cfg, stage, lambda cfg: {})
    assert cfg.table("stages").version() is None


def test_a_failure_does_not_make_a_work_folder(tmp_path):
    cfg = load(None, [f"work={tmp_path / 'misspelled'}"])
    with pytest.raises(ValueError, match="no such target"):
        logged(cfg, "ingest", fail(ValueError("no such target")))
    assert not cfg.place().path.exists()


def test_a_note_that_cannot_be_written_is_no_error(cfg, monkeypatch, capsys):
    def refuse(*_):
        raise OSError("the store refuses access\nmore")

    monkeypatch.setattr(type(cfg.table("stages")), "append", refuse)
    assert logged(cfg, "evaluate", lambda cfg: {"tau": 2.0}) == {"tau": 2.0}
    error = " ".join(capsys.readouterr().err.split())
    assert "note: evaluate was not noted in" in error
    assert "the store refuses access" in error
    with pytest.raises(ValueError, match="bad"):
        logged(cfg, "evaluate", fail(ValueError("bad")))


def test_a_long_summary_stays_json_and_names_what_was_left_out(monkeypatch):
    assert shortened({"a": 1}) == '{"a": 1}'
    monkeypatch.setattr(stage_log, "LONGEST", 200)
    summary = {"stage": "evaluate", "slices": ["x" * 90] * 9, "tau": 2.0, "rows": ["y"] * 99}
    text = shortened(summary)
    assert len(text) <= 200
    assert json.loads(text) == {"stage": "evaluate", "tau": 2.0, "cut": ["slices", "rows"]}
    assert len(shortened({"a": "x" * 300})) <= 200
