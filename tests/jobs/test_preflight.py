"""`flywheel preflight` on a tiny target with a real vLLM: what passes, and what is caught."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from dflash.checkpoint import save_drafter
from dflash.hypotheses import hypotheses
from dflash.model import new_drafter
from jobs import preflight
from jobs.base import cli
from jobs.base.checks import Check
from jobs.base.config import Config, load
from jobs.proof import engine_checks, kept_results, preflight_run
from jobs.proof.template_check import Endings, check_template
from jobs.servers import server_pool
from tests.helpers.tiny import native_bfloat16
from tests.helpers.work import CHAT_SETTINGS, make_chats

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def work(tmp_path_factory, ray_cluster):
    """A target with captured greedy chat traffic, and a drafter that has memorised the answers."""
    return make_chats(tmp_path_factory.mktemp("preflight"))


def configure(work, *more) -> Config:
    return load(None, [f"work={work}", *CHAT_SETTINGS, *more])


@pytest.fixture(scope="module")
def first(work):
    """The summary of a preflight that ran, its server's answers, and the rows it asked for."""
    kept, wanted = [], []

    def spy(*args):
        kept.append(real(*args))
        return kept[0]

    real, read = preflight_run.serve, preflight_run.with_features
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight_run, "serve", spy)
        patch.setattr(
            preflight_run,
            "with_features",
            lambda cfg, rows, taps: wanted.extend(rows) or read(cfg, rows),
        )
        good = work / "drafters" / "good"
        summary = preflight.run(configure(work, f"preflight.drafter={good}"))
    assert len(wanted) == len(kept[0].answers), "features of the rows that are used alone"
    return summary, kept[0]


@pytest.fixture(scope="module")
def ours(work):
    return prepared(work, work / "drafters" / "good")


def prepared(work, folder):
    cfg = configure(work)
    return preflight_run.prepare(cfg, folder, preflight_run.held_out(cfg, folder))


@pytest.fixture(scope="module")
def answers(first, ours):
    """What was served, as our target reads it."""
    return [preflight_run.answer_of(ours, one) for one in first[1].answers + first[1].probes]


def traced(ours, served, answers):
    names = [*(row["sample_id"] for row in ours.rows), "probe", "probe, cached"]
    return preflight_run.traces(names, served.answers + served.probes, answers, served.drafts)


def rows(summary):
    return {check["name"]: check["status"] for check in summary["checks"]}


def test_a_sound_drafter_passes_every_check(first):
    summary, _ = first
    found = rows(summary)
    assert summary["ok"], summary["checks"]
    assert found.pop("target") == "warn", "it was not evaluated"
    assert set(found.values()) == {"ok"}, found
    engine = ["features", "fit", "served target", "template", "drafts", "prefix cache", "tau"]
    assert list(found)[-7:] == engine
    assert summary["different"] == 0
    assert summary["drafts"] > 200
    assert summary["tau_served"]["pooled"] == pytest.approx(
        summary["tau_replay"]["pooled"], rel=0.01
    )
    assert summary["tau_served"]["pooled"] > 1.5, "a drafter that accepts nothing proves nothing"


def test_a_pass_is_kept_and_reused(first, work, monkeypatch):
    summary, _ = first
    assert kept_results.preflight_verdict(configure(work), work / "drafters" / "good") == "passed"
    monkeypatch.setattr(preflight_run, "serve", lambda *args: pytest.fail("served again"))
    again = preflight.run(configure(work, f"preflight.drafter={work / 'drafters' / 'good'}"))
    assert again == summary | {"reused": True}
    other = configure(work, "serve.k=[2]")
    assert kept_results.preflight_verdict(other, work / "drafters" / "good") != "passed"


def test_a_broken_folder_is_refused_before_a_server_starts(work, capsys, monkeypatch):
    monkeypatch.setattr(preflight_run, "serve", lambda *args: pytest.fail("served"))
    broken = work / "drafters" / "broken"
    shutil.copytree(work / "drafters" / "good", broken)
    config = json.loads((broken / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = 1
    (broken / "config.json").write_text(json.dumps(config))
    assert cli.main(["preflight", f"work={work}", *CHAT_SETTINGS, str(broken)]) == 1
    output = capsys.readouterr()
    summary = json.loads(output.out.splitlines()[-1])
    assert rows(summary)["mask token"] == "fail"
    assert rows(summary)["engine"] == "skip"
    assert "train with drafter.mask_token_id" in output.err
    assert list(work.glob("preflight/*.json"))


def test_a_mislabelled_folder_that_vllm_serves_as_it_says_is_named(work):
    """Another RoPE base, or taps in another convention: vLLM and replay agree, both are wrong."""
    good = preflight_run.load_drafter(work / "drafters" / "good")
    for wrong, name in (({"rope_theta": 7.0}, "rope_theta 10000"), ({"mask_token_id": 2}, "96")):
        drafter = new_drafter(replace(good.cfg, **wrong), 0)
        drafter.load_state_dict(good.state_dict())
        folder = save_drafter(drafter, work / "drafters" / name.replace(" ", "-"), torch.float32)
        known = hypotheses(drafter.cfg, [1e4], [96, 2])
        check = engine_checks.check_fit(replace(prepared(work, folder), table=known))
        assert check.status == "fail"
        assert f"{name}'" in check.found


def test_features_of_other_layers_are_caught(ours):
    assert engine_checks.check_features(ours).status == "ok"
    taps = ours.drafter.cfg.target_layer_ids
    shifted = replace(ours, recorded=[answer.request(taps, 1) for answer in ours.answers])
    check = engine_checks.check_features(shifted)
    assert (check.status, "one layer later by 0.00%" in check.found) == ("fail", True)


def test_other_weights_in_the_engine_are_caught(first, ours, answers):
    _, served = first
    traces = traced(ours, served, answers)
    assert engine_checks.check_drafts(ours, traces)[0].status == "ok"
    stale = replace(ours, drafter=new_drafter(ours.drafter.cfg, 5))
    check, found = engine_checks.check_drafts(stale, traces)
    assert check.status == "fail"
    assert "none of" in check.fix
    assert found["different"] > 0.5 * found["drafts"]
    assert engine_checks.check_cache(stale, traces, 256).status == "fail"
    assert engine_checks.check_cache(ours, traces, 0).status == "skip"
    check, _ = engine_checks.check_tau(stale, served, answers)
    assert check.status == "fail"


def test_zeros_that_vllm_drafts_near_its_limit_are_named(first, ours, answers):
    trace = next(t for t in traced(ours, first[1], answers) if 0 in t.accepted)
    drafts = trace.drafts.clone()
    drafts[trace.accepted.index(0)] = 0
    check, found = engine_checks.check_drafts(ours, [replace(trace, drafts=drafts)])
    assert check.status == "fail"
    assert "vLLM drafts zeros within K + 1 tokens of its limit" in check.found
    assert "serve.max_model_len" in check.fix
    assert found["differences"][0]["theirs"] == 0


def test_another_text_is_blamed_on_the_target(first, ours):
    _, served = first
    changed = [replace(c, output_ids=[9, *c.output_ids[1:]]) for c in served.answers]
    answers = [preflight_run.answer_of(ours, completion) for completion in changed]
    assert engine_checks.check_text(answers, ours.ties).status == "fail"


def test_answers_that_are_not_the_recorded_ones_do_not_fail_tau(first, ours, answers):
    """In bfloat16 most texts leave the recorded ones at a tie. Rounds are compared on the served
    text, so that does not matter.
    """
    other = replace(ours, rows=[row | {"output_ids": [9, 9]} for row in ours.rows])
    check, measured = engine_checks.check_tau(other, first[1], answers)
    assert check.status == "ok"
    assert measured["comparison"]["identical_rounds"] == len(ours.rows)


def test_answers_shorter_than_a_block_are_not_checked(first, ours):
    """Every round is cut at the end of the answer, so equal counts would prove nothing."""
    _, served = first
    short = replace(served, answers=[cut(one, ours.k) for one in served.answers])
    answers = [preflight_run.answer_of(ours, one) for one in short.answers]
    check, measured = engine_checks.check_tau(ours, short, answers)
    assert (check.status, measured) == ("skip", {})
    assert "not checked" in check.found
    check = engine_checks.check_fit(replace(ours, answers=answers))
    assert (check.status, "not checked" in check.found) == ("skip", True)


def cut(completion, length):
    """The answer as a server with max_tokens = length gives it."""
    spec = {"per_step_accepted": [length - 2], "per_step_drafted": [3], "num_spec_steps": 1}
    return replace(completion, output_ids=completion.output_ids[:length], spec=spec)


def test_a_preflight_that_compared_nothing_is_not_passed():
    skipped = [Check("tau", "not checked", "skip"), Check("drafts", "not recorded", "skip")]
    assert [c.status for c in preflight_run.nothing_compared(skipped)] == ["fail"]
    assert preflight_run.nothing_compared([*skipped[:1], Check("drafts", "fine")]) == []


@native_bfloat16
def test_a_sound_drafter_passes_in_bfloat16(work):
    """All 13,517 drafts once equalled ours, but near ties and texts failed the preflight."""
    good = work / "drafters" / "good"
    summary = preflight.run(configure(work, f"preflight.drafter={good}", "target.dtype=bfloat16"))
    found = rows(summary)
    assert summary["ok"], summary["checks"]
    assert {found[name] for name in ("served target", "drafts", "tau")} == {"ok"}
    assert summary["tau_served"]["pooled"] > 1.5


def test_without_memory_for_one_server_it_is_refused_with_numbers(work, monkeypatch):
    monkeypatch.setattr(server_pool, "free_bytes", lambda: 2**30)
    good = work / "drafters" / "good"
    with pytest.raises(ValueError, match=r"room for 0: .*GiB.*1\.0 GiB are free"):
        preflight.run(configure(work, f"preflight.drafter={good}", "serve.k=[1]"))


def test_the_engine_ends_prompts_as_the_traffic_does(first, work):
    _, served = first
    assert served.endings == Endings(
        engine={None: [5], True: [5], False: [5, 6]}, folder={None: [5], True: [5], False: [5, 6]}
    )
    other = replace(served.endings, engine={None: [5, 6], True: [5], False: [5, 6]})
    check = check_template(configure(work), other)
    assert check.status == "fail"
    assert "--default-chat-template-kwargs" in check.fix


def test_an_unpatched_cpu_is_a_row_that_names_the_fault(work, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "")
    good = work / "drafters" / "good"
    summary = preflight.run(configure(work, f"preflight.drafter={good}", "serve.k=[2]"))
    assert not summary["ok"]
    [server] = [check for check in summary["checks"] if check["name"] == "server"]
    assert server["status"] == "fail"
    assert "key_norm" in server["found"]
