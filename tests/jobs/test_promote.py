"""Promotion against a real MLflow: who becomes champion, who does not, and what is written down."""

import dataclasses
import json
import re
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
from jobs.base.settings import read_yaml
from jobs.promotion.rules import DEFAULT, read_rules
from jobs.proof import kept_results
from jobs.registry import versions
from jobs.registry.versions import Registry
from store import promotions
from store.place import write_json
from store.schemas import PROMOTIONS
from tests.helpers.promotion import (
    SHAPE,
    actions,
    aliases,
    cost,
    evaluate,
    make_drafter,
    make_registry,
    make_target,
    opened,
    part,
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


@pytest.mark.parametrize(
    ("action", "numbers", "reason"),
    [
        ("refuse", {"tau": 0.95}, r"tau: tau 0\.950 is below tau\.min 1\.1"),
        ("refuse", {"gain": -0.2}, r"gain: the lower end of the tau gain is -0\.300, .* no gain"),
        (
            "hold",
            {"tau": 1.15},
            r"tau: .* not established .*: about 120 more held-out conversations",
        ),
        ("hold", {"gain": 0.05}, r"gain: .* is -0\.050, .*: about 274 more held-out conversations"),
        ("hold", {"gain": 0.1}, r"gain: the lower end of the tau gain is \+0\.000, not above"),
        ("hold", {"conversations": 3}, r"gain: fewer than 5 held-out conversations have a round"),
    ],
)
def test_not_good_enough(cfg, action, numbers, reason):
    first, _ = promoted(cfg, "one", 1)
    folder = make_drafter(cfg, "two", 2)
    path = evaluate(cfg, folder, against=first, **numbers)
    cost(cfg, rounds=0.0101)  # speed is no reason here
    if "conversations" in numbers:
        edit(path, lambda e: e["baseline"].update(delta_ci=None))
    summary = promote.run(cfg)
    word = {"refuse": "refused", "hold": "held"}[action]
    assert (summary["decision"], summary["ok"]) == (word, False)
    assert any(re.search(reason, text) for text in summary["reasons"]), summary["reasons"]
    assert aliases(cfg) == {"champion": "1", "challenger": "2"}
    assert actions(cfg) == [("promote", None, "1"), (action, "1", "2")]
    with pytest.raises(ValueError, match="champion 1 is the first one"):
        rollback.run(cfg)  # a record that is no move is no champion to go back to


def edit(path, change):
    """Change an evaluation on disk."""
    evaluation = json.loads(path.read_text())
    change(evaluation)
    path.write_text(json.dumps(evaluation))


@pytest.mark.parametrize(
    ("found", "verdict", "reason"),
    [
        (part("b", 2.0, -0.2, half=0.1), "refuse", "a loss of more than 2.0% of tau 2.000 is"),
        (part("b", 2.0, -0.1, half=0.32), "hold", "about 160 more held-out conversations of b"),
        (part("b", 2.0, -0.12, half=0.1), "pass", ""),  # a loss of 10 % would have been refused
        (part("b", 2.0, 0.2, half=0.3), "pass", ""),  # a loss of 10 % is excluded
        (part("b", 2.0, -0.2) | {"ci_corrected": None, "ci": None}, "hold", "fewer than 5"),
    ],
)
def test_a_domain_is_judged_by_its_interval(cfg, found, verdict, reason):
    first, _ = promoted(cfg, "one", 1)
    path = evaluate(cfg, make_drafter(cfg, "two", 2), against=first)
    edit(path, lambda e: e["baseline"]["judged"].append(found))
    summary = promote.run(cfg)
    row = [row for row in summary["rules"] if row["rule"] == "domain b"][-1]
    assert row["verdict"] == verdict
    assert reason in row["fix"]
    assert (row["value"], row["conversations"]) == (found["delta"], 20)
    expected = {"pass": "promoted", "hold": "held", "refuse": "refused"}[verdict]
    assert summary["decision"] == expected
    record = promotions.read(cfg.table("promotions"))[-1]
    assert record["evidence"]["rules"] == summary["rules"]


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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_size": 8}, "block_size is 8, the champion has 4"),
        ({"target_layer_ids": (0, 1, 2)}, "target_layer_ids is [0, 1, 2], the champion has [0, 2]"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, the champion has 1"),
    ],
)
def test_another_shape_may_challenge_and_means_a_restart(cfg, changes, said, tmp_path):
    first, summary = promoted(cfg, "one", 1)
    assert summary["rollout"] == "restart", "nothing was served before"
    other = replace(SHAPE, **changes)
    folder = make_drafter(cfg, "two", 2, other)
    evaluate(cfg, folder, against=first, shape=other)
    strict = cfg.override("promote", gate=rules(tmp_path, "shape: {may_change: false}"))
    (reason,) = promote.run(strict)["reasons"]
    assert reason.startswith(f"shape: {said}")
    assert "shape.may_change: true allows it" in reason
    summary = promote.run(cfg)
    assert (summary["decision"], summary["rollout"]) == ("promoted", "restart")
    assert promotions.read(cfg.table("promotions"))[-1]["evidence"]["rollout"] == "restart"
    third = make_drafter(cfg, "three", 3, other)
    evaluate(cfg, third, against=folder, shape=other)
    assert promote.run(cfg.override("promote", drafter=str(third)))["rollout"] == "swap"


def rules(folder, text):
    path = folder / "rules.yaml"
    path.write_text(text)
    return str(path)


def test_a_drafter_that_pays_nowhere_is_refused_with_the_numbers(cfg, tmp_path):
    folder = make_drafter(cfg, "one", 1)
    evaluate(cfg, folder, tau=1.44)
    cost(cfg, step=0.010, rounds=0.0146)
    (reason,) = promote.run(cfg)["reasons"]
    assert reason.startswith("speed: it pays at no batch size; predicted 0.986 at 1 (K 3), ")
    assert "; costs as measured with another" in reason
    assert versions.served_k(cfg, "1") == [0]
    cost(cfg, step=0.010, rounds=0.0140)
    assert promote.run(cfg)["decision"] == "promoted"
    assert versions.served_k(cfg, "1") == [3]


def test_k_is_zero_where_nothing_pays_and_the_floor_is_a_rule(cfg, tmp_path):
    folder = make_drafter(cfg, "one", 1)
    evaluate(cfg, folder)
    cost(cfg, step=0.010, rounds=0.010, each=0.0019)
    found = promote.plan(cfg)["plan"]
    assert found["decision"] == "promoted"
    assert found["k"] == [2, 2, 1, 1, 1, 0]
    values = {row["rule"]: row["value"] for row in found["rules"]}
    assert values["speed, 1 at once"] == pytest.approx((1 + 1 / 1.2) * 11.9 / 15.7)
    assert values["speed, 8 at once"] < 1
    higher = cfg.override("promote", gate=rules(tmp_path, "speed: {floor: [1, 1, 1.4]}"))
    assert promote.plan(higher)["plan"]["k"] == [2, 2, 0]
    assert promote.run(cfg)["k"] == found["k"] == versions.served_k(cfg, "1")


def test_without_costs_it_is_held_unless_the_rule_says_otherwise(cfg, tmp_path):
    folder = make_drafter(cfg, "one", 1)
    evaluate(cfg, folder)
    shutil.rmtree(cfg.place("verified").path)
    summary = promote.run(cfg)
    assert summary["decision"] == "held"
    assert summary["reasons"] == [
        f"speed: run `flywheel verify {folder}`, which measures what a round costs"
    ]
    cost(cfg, replace(SHAPE, block_size=8))  # another shape has other costs
    assert promote.run(cfg)["decision"] == "held"
    free = cfg.override("promote", gate=rules(tmp_path, "speed: {required: false}"))
    summary = promote.run(free)
    assert (summary["decision"], summary["k"]) == ("promoted", [])
    (row,) = [row for row in summary["rules"] if row["rule"] == "speed"]
    assert row["fix"] == "not measured, and speed.required is false"


def test_a_plan_shows_every_rule_and_changes_nothing(cfg, capsys):
    first, _ = promoted(cfg, "one", 1)
    folder = make_drafter(cfg, "two", 2)
    evaluate(cfg, folder, against=first)
    before = sorted(p for p in cfg.path().rglob("*") if p.is_file())
    for flag in ("--plan", "--dry-run"):
        assert cli.main(["promote", flag, str(folder), f"work={cfg.work}"]) == 0
        out, err = capsys.readouterr()
        found = json.loads(out)["plan"]
        assert (found["decision"], found["rollout"]) == ("promoted", "swap")
        named = {row["rule"].split(",")[0].split(" ")[0] for row in found["rules"]}
        assert named == {
            *("target", "champion", "tau", "gain", "domain", "leaking", "speed"),
            *("preflight", "shape"),
        }
        assert all(word in err for word in ("domain a", "tokens per round", "0.1 .. 0.3"))
    assert sorted(p for p in cfg.path().rglob("*") if p.is_file()) == before
    assert aliases(cfg) == {"champion": "1"}
    assert actions(cfg) == [("promote", None, "1")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("domains: {maxloss: 0.1}", "did you mean domains.max_loss"),
        ("tau: {min: high}", "tau.min = 'high': expected number >= 1"),
        ("domains: {max_loss: 0.2}", "domains.max_loss = 0.2 and domains.visible = 0.1: expected"),
        ("regression: {visible: 3.0}", "regression.visible = 3.0: expected max_loss < visible"),
        ("leaking: {max_share: 2}", "leaking.max_share = 2.0: a share is at most 1"),
        ("gain: {worth: 0}", "gain.worth = 0.0: no data shows such a gain"),
        ("speed: {floor: []}", "speed.floor = []: expected numbers above 0"),
        ("speed: {floor: 1.0}", "speed.floor = 1.0: expected list of numbers"),
        ("- tau", "expected sections"),
        ("tau: [", "is not valid YAML"),
        ("speed: {required: 1}", "speed.required = 1: expected true or false"),
        ("taus: {min: 1.2}", "unknown setting 'taus': did you mean tau?"),
    ],
)
def test_rules_that_cannot_be_are_one_message(cfg, tmp_path, capsys, text, said):
    path = rules(tmp_path, text)
    assert cli.main(["promote", f"work={cfg.work}", f"promote.gate={path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}")
    assert said in error
    assert error.count("\n") == 1


def test_old_settings_and_a_missing_file_name_the_fix(cfg, tmp_path, capsys):
    assert cli.main(["promote", f"work={cfg.work}", "promote.min_tau=1"]) == 2
    assert "it is the rule tau.min of the gate's file now" in capsys.readouterr().err
    assert cli.main(["promote", f"work={cfg.work}", f"promote.gate={tmp_path / 'no'}"]) == 2
    assert "no such file; copy " in capsys.readouterr().err


def test_the_packaged_file_has_every_rule():
    """The classes have no defaults, so a rule that it lacks would be None."""
    found = dataclasses.asdict(read_rules(""))
    assert None not in [value for section in found.values() for value in section.values()]
    assert read_yaml(DEFAULT) == found


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


def test_a_leaking_held_out_set_decides_nothing(cfg):
    """With turns of one chat on both sides of the split, a gain may be memorised text."""
    folder = make_drafter(cfg, "one", 1)
    evaluate(cfg, folder, leaking={"leaking": 2, "samples": 100})
    (reason,) = promote.run(cfg)["reasons"]
    assert reason.startswith(
        "leaking: 2 of 100 held-out samples share their text with training samples"
    )
    evaluate(cfg, folder, leaking={"leaking": 1, "samples": 100})
    assert promote.run(cfg)["decision"] == "promoted"
    record = promotions.read(cfg.table("promotions"))[-1]
    assert record["evidence"]["leaking"] == {"leaking": 1, "samples": 100}


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


def test_a_drafter_without_a_passed_preflight_is_no_champion_if_that_is_asked_for(cfg, tmp_path):
    cfg = cfg.override("promote", gate=rules(tmp_path, "preflight: {required: true}"))
    folder, summary = promoted(cfg, "one", 1)
    assert summary["decision"] == "held"
    assert f"`flywheel preflight {folder}`" in summary["reasons"][0]
    kept = kept_results.preflight_result(cfg, folder)
    write_json(*kept, {"ok": False})
    assert promote.run(cfg)["decision"] == "refused"
    write_json(*kept, {"ok": True})
    assert promote.run(cfg.override("serve", k=[2]))["decision"] == "held", "another K"
    assert promote.run(cfg.override("serve", port=1))["decision"] == "promoted"


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
