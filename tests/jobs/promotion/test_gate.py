"""The rules of the gate on a real MLflow: what passes, holds, is refused, and what is said."""

import dataclasses
import json
import re
import shutil
from dataclasses import replace

import pytest

from dflash.checkpoint import drafter_sha256
from dflash.identity import target_id
from jobs import promote, rollback
from jobs.base import cli
from jobs.base.settings import read_yaml
from jobs.promotion.gate_rules import DEFAULT, read_rules
from jobs.proof import kept_results
from jobs.registry import versions
from store import promotions
from store.place import write_json
from tests.helpers.promotion import (
    SHAPE,
    actions,
    aliases,
    cost,
    evaluate,
    make_drafter,
    make_registry,
    part,
    promoted,
)


@pytest.fixture
def cfg(tmp_path, empty_database):
    return make_registry(tmp_path, empty_database)


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
    assert found["k_by_batch_size"] == [2, 2, 1, 1, 1, 0]
    values = {row["rule"]: row["value"] for row in found["rules"]}
    assert values["speed, 1 at once"] == pytest.approx((1 + 1 / 1.2) * 11.9 / 15.7)
    assert values["speed, 8 at once"] < 1
    higher = cfg.override("promote", gate=rules(tmp_path, "speed: {floor: [1, 1, 1.4]}"))
    assert promote.plan(higher)["plan"]["k_by_batch_size"] == [2, 2, 0]
    assert (
        promote.run(cfg)["k_by_batch_size"]
        == found["k_by_batch_size"]
        == versions.served_k(cfg, "1")
    )


def test_without_costs_it_is_held_unless_the_rule_says_otherwise(cfg, tmp_path):
    folder = make_drafter(cfg, "one", 1)
    evaluate(cfg, folder)
    shutil.rmtree(cfg.place("verified").path)
    summary = promote.run(cfg)
    assert summary["decision"] == "held"
    assert summary["reasons"] == [
        f"speed: run `flywheel verify {folder}`, which measures what a round costs"
    ]
    failed = {"ok": False, "drafter_sha256": drafter_sha256(folder), "faults": ["texts differ"]}
    failed |= {"target_id": target_id(cfg.target_path), "costs": []}
    write_json(cfg.place("verified"), "failed.json", failed)
    assert "its `flywheel verify` failed" in promote.run(cfg)["reasons"][0]
    cost(cfg, replace(SHAPE, block_size=8))  # another shape has other costs
    assert promote.run(cfg)["decision"] == "held"
    free = cfg.override("promote", gate=rules(tmp_path, "speed: {required: false}"))
    summary = promote.run(free)
    assert (summary["decision"], summary["k_by_batch_size"]) == ("promoted", [])
    (row,) = [row for row in summary["rules"] if row["rule"] == "speed"]
    assert row["fix"] == "not measured, and speed.required is false"


def test_costs_of_other_k_than_were_evaluated_hold(cfg):
    folder = make_drafter(cfg, "one", 1)
    evaluate(cfg, folder, tau_by_k={"7": 2.0})
    summary = promote.run(cfg)
    assert summary["decision"] == "held"
    assert "it was evaluated at K 7 to 7" in summary["reasons"][0]


@pytest.mark.parametrize("where", ["tau", "baseline"])
def test_what_is_no_number_passes_no_rule(cfg, where):
    first, _ = promoted(cfg, "one", 1)
    path = evaluate(cfg, make_drafter(cfg, "two", 2), against=first)
    nan = float("nan")
    change = {
        "tau": lambda e: e["tau"].update(pooled=nan, ci=[nan, nan]),
        "baseline": lambda e: e["baseline"]["judged"][0].update(
            ci=[nan] * 2, ci_corrected=[nan] * 2
        ),
    }
    edit(path, change[where])
    with pytest.raises(ValueError, match=r"two\.json is damaged .*: run `flywheel evaluate"):
        promote.run(cfg)
    assert aliases(cfg)["champion"] == "1"


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
