"""Where a drafter comes from: tags of its version, and `flywheel history`."""

import json
import shutil

import pytest

from dflash.checkpoint import drafter_sha256
from jobs import history, promote, rollback
from jobs.base import cli
from jobs.proof.kept_results import preflight_result
from jobs.registry.versions import Registry
from jobs.tracking.mlflow_runs import Tracker
from store.ids import drafter_version
from store.place import write_json
from tests.helpers.promotion import evaluate, make_drafter, make_registry, promoted


@pytest.fixture
def cfg(tmp_path, empty_database):
    return make_registry(tmp_path, empty_database)


INPUTS = {"selection_version": 3, "traffic_version": 12, "features": "abc123", "target_id": "t"}


def trained(cfg, name, seed, base=None):
    """A drafter with the MLflow run of its training."""
    folder = make_drafter(cfg, name, seed)
    tracker = Tracker.start(cfg, name, INPUTS)
    tracker.describe({"base": drafter_sha256(base)} if base else {}, {}, "")
    tracker.end()
    return folder


def tags_of(cfg, number):
    return Registry(cfg).client.get_model_version(cfg.mlflow.model, number).tags


def test_a_version_says_what_it_was_made_from(cfg):
    first = trained(cfg, "one", 1)
    evaluate(cfg, first)
    write_json(*preflight_result(cfg, first), {"ok": True})
    cfg.place("reports").write("one.html", b"<html>")
    promote.run(cfg.override("promote", drafter=str(first)))
    tags = tags_of(cfg, "1")
    made = ["data.selection.version", "data.traffic.version", "data.features.key"]
    assert [tags[name] for name in made] == ["3", "12", "abc123"]
    assert tags["preflight"] == "passed"
    assert tags["report"] == str(cfg.place("reports", "one.html"))
    assert tags["eval.file"] == str(cfg.place("evaluations", "one.json"))
    assert "train.base.sha256" not in tags
    assert len(tags["code.commit"].removesuffix("-dirty")) == 40
    assert json.loads(tags["serve.k"]) == [3]
    second = trained(cfg, "two", 2, base=first)
    evaluate(cfg, second, against=first)
    promote.run(cfg.override("promote", drafter=str(second)))
    tags = tags_of(cfg, "2")
    assert tags["train.base.sha256"] == drafter_sha256(first)
    assert tags["train.base.version"] == "1"
    assert tags["preflight"] == "none"
    assert "report" not in tags


def test_history_shows_who_when_why_and_which_came_from_which(cfg, capsys):
    first = trained(cfg, "one", 1)
    evaluate(cfg, first)
    promote.run(cfg.override("promote", drafter=str(first)))
    second = trained(cfg, "two", 2, base=first)
    evaluate(cfg, second, against=first)
    promote.run(cfg.override("promote", drafter=str(second)))
    third = trained(cfg, "three", 3, base=make_drafter(cfg, "elsewhere", 9))
    evaluate(cfg, third, against=second, gain=-0.2)
    promote.run(cfg.override("promote", drafter=str(third)))
    rollback.run(cfg.override("rollback", reason="slow \x1b[31m" + "x" * 400))
    capsys.readouterr()
    assert cli.main(["history", f"work={cfg.work}"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    rows = found["decisions"]
    assert [row["action"] for row in rows] == ["promote", "promote", "refuse", "rollback"]
    assert [row["version"] for row in rows] == ["1", "2", "3", "1"]
    assert [row["gain"] for row in rows] == [None, 0.2, -0.2, None]
    assert rows[1]["tau_ci"] == [1.9, 2.1]
    assert rows[1]["base"] == drafter_version(drafter_sha256(first))
    assert (rows[1]["rollout"], rows[1]["k_by_batch_size"]) == ("swap", [3])
    assert rows[2]["reason"].startswith("gain: the lower end")
    assert all("@" in row["who"] for row in rows)
    names = [drafter_version(drafter_sha256(cfg.path("drafters", n))) for n in ("one", "two")]
    assert found["family"][:2] == [names[0], f"  {names[1]}"]
    assert found["family"][2].endswith("(not in the registry)")
    assert "\x1b[31m" not in err
    assert "\\x1b[31mxxx" in err


def test_a_history_of_nothing_writes_nothing(tmp_path, capsys):
    assert cli.main(["history", f"work={tmp_path}"]) == 0
    assert json.loads(capsys.readouterr().out)["decisions"] == []
    assert list(tmp_path.iterdir()) == []


def test_a_family_whose_tags_go_in_a_circle_ends():
    assert history.tree({"a": "b", "b": "a"}) == []
    assert history.tree({"a": None, "b": "a", "c": "a", "d": "b"}) == ["a", "  b", "    d", "  c"]


def test_an_evaluation_without_intervals_of_domains_is_made_again(cfg, capsys):
    first, _ = promoted(cfg, "one", 1)
    folder = make_drafter(cfg, "two", 2)
    path = evaluate(cfg, folder, against=first)
    old = json.loads(path.read_text())
    del old["baseline"]["judged"]
    path.write_text(json.dumps(old))
    assert cli.main(["promote", str(folder), f"work={cfg.work}"]) == 2
    assert "without the intervals of domains: run `flywheel evaluate`" in capsys.readouterr().err
    shutil.rmtree(folder)
