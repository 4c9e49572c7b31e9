"""`flywheel preflight` on a tiny target with a real vLLM: what passes, and what is caught."""

import json
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash.checkpoint import save_drafter
from dflash.decode import decode
from dflash.hypotheses import hypotheses
from dflash.model import new_drafter
from dflash.target import load_target
from dflash.train import generator
from jobs import cli, harvest, ingest, preflight, trial
from jobs.config import Config, load
from jobs.endings import Endings, check_template
from jobs.samples import load_requests
from jobs.shape import drafter_config
from tests.tiny import add_tokenizer, learn, make_target

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TEMPLATE = (
    "{% for m in messages %}w4 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w5"
    "{% if enable_thinking is defined and not enable_thinking %} w6{% endif %}{% endif %}"
)
SETTINGS = [
    "drafter.num_taps=2",
    "drafter.block_size=4",
    "drafter.mask_token_id=96",
    "ingest.test_percent=40",
    "target.dtype=float32",
    "serve.max_model_len=500",
    "serve.kv_cache_gib=1",
]
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 1,
}


def configure(work, *more) -> Config:
    return load(None, [f"work={work}", *SETTINGS, *more])


@pytest.fixture(scope="module")
def work(tmp_path_factory, ray_cluster):
    """A target with captured greedy chat traffic, and a drafter that knows the answers by heart."""
    folder = tmp_path_factory.mktemp("preflight")
    add_tokenizer(make_target(folder / "target", **SHAPE), 97, TEMPLATE)
    target = load_target(folder / "target", torch.float32)
    (folder / "capture").mkdir()
    with open(folder / "capture" / "log.jsonl", "w") as log:
        for i in range(40):
            words = torch.randint(7, 90, (4 + i % 5,), generator=generator("preflight", i))
            prompt = [4, *words.tolist(), 5]
            log.write(json.dumps(record(i, prompt, decode(target, prompt, 24, [1]).output_ids)))
            log.write("\n")
    cfg = configure(folder)
    ingest.run(cfg)
    harvest.run(cfg)
    drafter = learn(drafter_config(cfg), target, load_requests(cfg, "test")[1], steps=70)
    save_drafter(drafter, folder / "drafters" / "good", torch.float32)
    return folder


def record(i, prompt, output):
    return {
        "v": 1,
        "captured_at": "2026-01-02T03:04:05Z",
        "request_id": f"r{i}",
        "prompt_ids": prompt,
        "output_ids": output,
        "finish_reason": "length",
        "temperature": 0.0,
        "conversation_id": f"c{i}",
        "domain": "chat",
    }


@pytest.fixture(scope="module")
def first(work):
    """The summary of a preflight that ran, and what its server answered."""
    kept = []

    def spy(*args):
        kept.append(real(*args))
        return kept[0]

    real = trial.serve
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "serve", spy)
        good = work / "drafters" / "good"
        return preflight.run(configure(work, f"preflight.drafter={good}")), kept[0]


@pytest.fixture(scope="module")
def ours(work):
    return trial.prepare(configure(work), work / "drafters" / "good")


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
    assert preflight.passed(configure(work), work / "drafters" / "good")
    monkeypatch.setattr(trial, "serve", lambda *args: pytest.fail("served again"))
    again = preflight.run(configure(work, f"preflight.drafter={work / 'drafters' / 'good'}"))
    assert again == summary | {"reused": True}
    assert not preflight.passed(configure(work, "serve.k=[2]"), work / "drafters" / "good")


def test_a_broken_folder_is_refused_before_a_server_starts(work, capsys, monkeypatch):
    monkeypatch.setattr(trial, "serve", lambda *args: pytest.fail("served"))
    broken = work / "drafters" / "broken"
    shutil.copytree(work / "drafters" / "good", broken)
    config = json.loads((broken / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = 1
    (broken / "config.json").write_text(json.dumps(config))
    assert cli.main(["preflight", f"work={work}", *SETTINGS, str(broken)]) == 1
    output = capsys.readouterr()
    summary = json.loads(output.out.splitlines()[-1])
    assert rows(summary)["mask token"] == "fail"
    assert rows(summary)["engine"] == "skip"
    assert "train with drafter.mask_token_id" in output.err
    assert list(work.glob("preflight/*.json"))


def test_a_mislabelled_folder_that_vllm_serves_as_it_says_is_named(work):
    """Rope of another base, taps of another convention: vLLM and replay agree, both wrong."""
    good = trial.load_drafter(work / "drafters" / "good")
    for wrong, name in (({"rope_theta": 7.0}, "rope_theta 10000"), ({"mask_token_id": 2}, "96")):
        drafter = new_drafter(replace(good.cfg, **wrong), 0)
        drafter.load_state_dict(good.state_dict())
        folder = save_drafter(drafter, work / "drafters" / name.replace(" ", "-"), torch.float32)
        prepared = trial.prepare(configure(work), folder)
        known = hypotheses(drafter.cfg, [1e4], [96, 2])
        check = trial.check_fit(replace(prepared, table=known))
        assert check.status == "fail"
        assert f"{name}'" in check.found


def test_features_of_other_layers_are_caught(ours):
    assert trial.check_features(ours).status == "ok"
    taps = ours.drafter.cfg.target_layer_ids
    shifted = replace(ours, recorded=[answer.request(taps, 1) for answer in ours.answers])
    check = trial.check_features(shifted)
    assert (check.status, "one layer later by 0.00%" in check.found) == ("fail", True)


def test_other_weights_in_the_engine_are_caught(first, ours):
    _, served = first
    answers = [trial._answer_of(ours, one) for one in served.answers + served.probes]
    traces = trial.traces(ours, served, answers)
    assert trial.check_drafts(ours, traces)[0].status == "ok"
    stale = replace(ours, drafter=new_drafter(ours.drafter.cfg, 5))
    check, found = trial.check_drafts(stale, traces)
    assert check.status == "fail"
    assert "none of" in check.fix
    assert found["different"] > 0.5 * found["drafts"]
    assert trial.check_cache(stale, traces, 256).status == "fail"
    assert trial.check_cache(ours, traces, 0).status == "skip"
    check, _ = trial.check_tau(stale, served)
    assert check.status == "fail"


def test_zeros_that_vllm_drafts_near_its_limit_are_named(first, ours):
    _, served = first
    answers = [trial._answer_of(ours, one) for one in served.answers + served.probes]
    trace = next(t for t in trial.traces(ours, served, answers) if 0 in t.accepted)
    drafts = trace.drafts.clone()
    drafts[trace.accepted.index(0)] = 0
    check, found = trial.check_drafts(ours, [replace(trace, drafts=drafts)])
    assert check.status == "fail"
    assert "vLLM drafts zeros within K + 1 tokens of its limit" in check.found
    assert "serve.max_model_len" in check.fix
    assert found["differences"][0]["theirs"] == 0


def test_another_text_is_blamed_on_the_target(first, ours):
    _, served = first
    changed = [replace(c, output_ids=[9, *c.output_ids[1:]]) for c in served.answers]
    check, measured = trial.check_tau(ours, replace(served, answers=changed))
    assert (check.status, measured) == ("fail", {})
    answers = [trial._answer_of(ours, completion) for completion in changed]
    assert trial.check_text(answers, ours.bound).status == "fail"


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
