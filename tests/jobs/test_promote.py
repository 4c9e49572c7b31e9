"""Promotion against a real MLflow: who becomes champion, who does not, and what is written down."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta

import pyarrow as pa
import pytest
import torch

from dflash.checkpoint import drafter_sha256, load_drafter, save_drafter
from dflash.identity import legacy_target_id
from jobs import promote, rollback
from jobs.base import cli
from jobs.base.config import load
from jobs.registry import versions
from jobs.registry.versions import Registry
from store import promotions
from store.schemas import PROMOTIONS
from tests.helpers.promotion import (
    SHAPE,
    actions,
    aliases,
    evaluate,
    make_drafter,
    make_registry,
    make_target,
    opened,
    promoted,
)


@pytest.fixture
def cfg(tmp_path, empty_database):
    return make_registry(tmp_path, empty_database)


def test_first_champion_second_champion_and_rollback(cfg):
    first, summary = promoted(cfg, "one", 1)
    assert (summary["decision"], summary["ok"], summary["version"]) == ("promoted", True, "1")
    assert json.loads(json.dumps(summary)) == summary
    number, folder = opened(cfg, "champion")
    assert (number, folder.name, drafter_sha256(folder)) == ("1", "one", drafter_sha256(first))
    second, summary = promoted(cfg, "two", 2, against=first)
    assert (summary["version"], summary["previous"]) == ("2", "1")
    assert aliases(cfg) == {"champion": "2", "previous": "1"}
    back = rollback.run(load(None, [f"work={cfg.work}", "rollback.reason=slow"]))
    assert (back["version"], back["previous"]) == ("1", "2")
    assert aliases(cfg) == {"champion": "1", "previous": "2"}
    assert drafter_sha256(opened(cfg, "2")[1]) == drafter_sha256(second)
    assert actions(cfg) == [("promote", None, "1"), ("promote", "1", "2"), ("rollback", "2", "1")]
    record = promotions.read(cfg.table("promotions"))[1]
    assert record["evidence"]["baseline"]["drafter_sha256"] == drafter_sha256(first)
    assert "@" in record["who"]
    assert record["decided_at"].utcoffset() == timedelta(0)
    assert [r["number"] for r in promotions.read(cfg.table("promotions"))] == [1, 2, 3]


def test_a_version_that_was_rolled_back_is_not_promoted_again(cfg):
    first, _ = promoted(cfg, "one", 1)
    promoted(cfg, "two", 2, against=first)
    rollback.run(cfg)
    copy = make_drafter(cfg, "two-again", 2)  # the same weights under another name
    evaluate(cfg, copy, against=first)
    summary = promote.run(cfg)
    assert (summary["decision"], summary["version"]) == ("refused", "2")
    assert "was rolled back: no reason given" in summary["reasons"][0]
    with pytest.raises(ValueError, match="version 2: it was rolled back itself"):
        rollback.run(cfg)


def test_the_same_weights_are_one_version_and_repeating_changes_nothing(cfg):
    promoted(cfg, "one", 1)
    _, summary = promoted(cfg, "one-copy", 1)
    assert (summary["decision"], summary["version"], summary["ok"]) == ("unchanged", "1", True)
    assert actions(cfg) == [("promote", None, "1")]


def test_a_drafter_no_better_than_none_is_no_first_champion(cfg):
    _, summary = promoted(cfg, "one", 1, tau=1.02)
    assert summary["decision"] == "refused"
    assert aliases(cfg) == {"challenger": "1"}
    assert versions.resolve(cfg, "champion") is None


def test_champion_changed_since_the_evaluation(cfg):
    first, _ = promoted(cfg, "one", 1)
    late = make_drafter(cfg, "late", 3)
    evaluate(cfg, late, against=first)
    promoted(cfg, "two", 2, against=first)
    summary = promote.run(replace(cfg, promote=replace(cfg.promote, drafter=str(late))))
    (reason,) = summary["reasons"]
    assert summary["decision"] == "held"
    assert "but the champion is version 2" in reason
    assert "evaluate again" in reason
    assert aliases(cfg) == {"champion": "2", "previous": "1", "challenger": "3"}


def test_dangling_champion_is_no_champion(cfg):
    first, _ = promoted(cfg, "one", 1)
    Registry(cfg).client.delete_model_version("drafter", "1")
    assert versions.resolve(cfg, "champion") is None
    _, summary = promoted(cfg, "two", 2, against=first)
    assert "but the champion is none" in summary["reasons"][0]
    _, summary = promoted(cfg, "two", 2)
    assert (summary["decision"], summary["version"]) == ("promoted", "2")
    with pytest.raises(ValueError, match="version 1: it was deleted"):
        rollback.run(cfg)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": 32}, "hidden_size is 16, the target has 32"),
        ({"vocab_size": 60}, "vocab_size is 50, the target has 60"),
        ({"num_hidden_layers": 6}, "num_target_layers is 4, the target has 6"),
        ({"requantised": True}, "target_id is "),
    ],
)
def test_drafter_for_another_target_is_refused_field_by_field(cfg, change, field):
    folder = make_drafter(cfg, "one", 1)
    evaluate(cfg, folder)
    make_target(cfg, **change)
    summary = promote.run(cfg)
    assert (summary["decision"], summary["version"]) == ("refused", None)
    assert any(field in reason for reason in summary["reasons"])
    assert aliases(cfg) == {}


def test_config_edited_after_the_evaluation(cfg, capsys):
    """The same weights with another config are another drafter, whose tau is not measured."""
    folder = make_drafter(cfg, "one", 1)
    evaluate(cfg, folder)
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    assert cli.main(["promote", str(folder), f"work={cfg.work}"]) == 2
    assert f"has changed since {cfg.place('evaluations', 'one.json')}" in capsys.readouterr().err
    evaluate(cfg, folder, shape=replace(SHAPE, rope_theta=20000.0))
    assert promote.run(cfg)["version"] == "1"
    edited = opened(cfg, "champion")[1] / "config.json"
    edited.write_text(edited.read_text().replace("20000.0", "10000.0"))
    with pytest.raises(ValueError, match="holds another drafter than was registered"):
        versions.resolve(cfg, "champion")


def test_user_errors_are_one_message(cfg, capsys):
    assert cli.main(["promote", f"work={cfg.work}"]) == 2
    assert "run `flywheel train` first" in capsys.readouterr().err
    folder = make_drafter(cfg, "one", 1)
    assert cli.main(["promote", f"work={cfg.work}"]) == 2
    assert "was not evaluated" in capsys.readouterr().err
    path = evaluate(cfg, folder)
    path.write_text(path.read_text()[:30])
    assert cli.main(["promote", str(folder), f"work={cfg.work}"]) == 2
    assert "is damaged" in capsys.readouterr().err
    evaluate(cfg, folder)
    make_drafter(cfg, "one", 2)
    assert cli.main(["promote", str(folder), f"work={cfg.work}"]) == 2
    assert "has changed since" in capsys.readouterr().err
    assert cli.main(["rollback", f"work={cfg.work}"]) == 2
    assert "no champion" in capsys.readouterr().err
    evaluate(cfg, folder, tau=1.0)
    assert cli.main(["promote", str(folder), f"work={cfg.work}"]) == 1


def test_resolve_checks_the_drafter_and_names_the_folder(cfg):
    source, _ = promoted(cfg, "one", 1)
    shutil.rmtree(source)  # a version is what was uploaded, not the folder it came from
    folder = opened(cfg, "champion")[1]
    assert folder.is_relative_to(cfg.path("mlartifacts"))
    save_drafter(load_drafter(folder), folder, torch.bfloat16)
    with pytest.raises(ValueError, match=r"drafters/.*/one holds another drafter"):
        versions.resolve(cfg, "champion")
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match=r"drafters/.*/one is gone; version 1"):
        versions.resolve(cfg, "champion")
    with pytest.raises(ValueError, match="no version 7"):
        versions.resolve(cfg, "7")
    assert versions.resolve(cfg, "previous") is None


def test_rollback_skips_what_no_longer_loads(cfg):
    first, _ = promoted(cfg, "one", 1)
    second, _ = promoted(cfg, "two", 2, against=first)
    promoted(cfg, "three", 3, against=second)
    shutil.rmtree(opened(cfg, "2")[1])
    summary = rollback.run(cfg)
    assert summary["version"] == "1"
    assert "two is gone" in summary["skipped"][0]


def test_an_evaluation_that_does_not_know_about_leaks_is_made_again(cfg, capsys):
    folder = make_drafter(cfg, "one", 1)
    path = evaluate(cfg, folder)
    old = json.loads(path.read_text())
    del old["leaking"]
    path.write_text(json.dumps(old))
    assert cli.main(["promote", str(folder), f"work={cfg.work}"]) == 2
    assert f"it lacks leaking): run `flywheel evaluate {folder}`" in capsys.readouterr().err


def test_registry_that_was_never_written_is_not_created_by_asking(tmp_path):
    cfg = load(None, [f"work={tmp_path}"])
    assert versions.resolve(cfg, "champion") is None
    assert list(tmp_path.iterdir()) == []


def test_interrupted_before_the_record_is_completed_by_the_next_run(cfg, monkeypatch):
    folder = make_drafter(cfg, "one", 1)
    evaluate(cfg, folder)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(promotions.Decisions, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            promote.run(cfg)
    assert aliases(cfg) == {"champion": "1", "challenger": "1"}
    assert promote.run(cfg)["decision"] == "unchanged"
    assert aliases(cfg) == {"champion": "1"}
    assert actions(cfg) == [("promote", None, "1")]
    assert "interrupted" in promotions.read(cfg.table("promotions"))[0]["reason"]


@pytest.mark.slow
def test_two_racing_promoters_and_a_killed_one(cfg):
    """Both were evaluated when there was no champion: one wins, the other must be evaluated again.
    A third process that dies while it holds the lease blocks nobody."""
    hold = (
        "import sys, time; from jobs.base.config import load\n"
        "from jobs.promotion.champion_moves import promoting\n"
        "with promoting(load(None, sys.argv[1:])): print('held', flush=True); time.sleep(60)"
    )
    work = f"work={cfg.work}"
    command = [sys.executable, "-c", hold, work]
    folders = [make_drafter(cfg, name, seed) for seed, name in enumerate(["one", "two"])]
    for folder in folders:
        evaluate(cfg, folder)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        racers = [
            subprocess.Popen(
                [sys.executable, "-m", "jobs.promote", str(folder), work],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for folder in folders
        ]
        with pytest.raises(subprocess.TimeoutExpired):
            racers[0].wait(15)
        holder.kill()
    outputs = [racer.communicate(timeout=120) for racer in racers]
    assert sorted(r.returncode for r in racers) == [0, 1], outputs
    decisions = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    loser = next(d for d in decisions if d["decision"] == "held")
    winner = next(d for d in decisions if d["decision"] == "promoted")
    assert "compared with no drafter, but the champion is" in loser["reasons"][0]
    assert aliases(cfg)["champion"] == winner["version"]
    assert [action for action, _, _ in actions(cfg)] == ["promote", "hold"]


def formerly(cfg, number):
    """Tag a version as versions before December 2026 did, with the target's id of that time."""
    version = versions.Registry(cfg).get(number)
    assert version is not None
    fields = version.compat | {"target_id": legacy_target_id(cfg.target_path)}
    tags = (cfg.mlflow.model, number, versions.FIELDS, json.dumps(fields))
    Registry(cfg).client.set_model_version_tag(*tags)


def test_after_the_upgrade_the_old_champion_can_be_followed_and_returned_to(cfg):
    """Its target_id is the former id of the same folder. Promote and rollback once refused it."""
    first, _ = promoted(cfg, "one", 1)
    formerly(cfg, "1")
    _, summary = promoted(cfg, "two", 2, against=first)
    assert summary["decision"] == "promoted", summary["reasons"]
    assert rollback.run(cfg)["version"] == "1"


def test_an_old_version_that_nothing_was_compared_with_is_named_with_what_to_do(cfg):
    """Partial fine-tunes of a target share its former id, so it alone proves nothing."""
    first, _ = promoted(cfg, "one", 1)
    second, _ = promoted(cfg, "two", 2, against=first)
    formerly(cfg, "1")
    table = cfg.table("promotions")
    rows = table.read().to_pylist()
    for row in rows:
        row["evidence"] = row["evidence"].replace('"target_id"', '"unknown"')
    other = table.write(pa.Table.from_pylist(rows, schema=PROMOTIONS))
    table.change(lambda live: ([other], list(live)))
    said = (
        r"version 1: it carries \w+, a former id.*`flywheel evaluate .*`, then `flywheel promote "
    )
    with pytest.raises(ValueError, match=said):
        rollback.run(cfg)
    evaluate(cfg, first, against=second, gain=-0.1)
    summary = promote.run(replace(cfg, promote=replace(cfg.promote, drafter=str(first))))
    assert summary["decision"] == "refused"
    assert rollback.run(cfg)["version"] == "1"
