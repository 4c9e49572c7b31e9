"""Samples that are too long for the engine, and answers without room for a draft: they are
reported and do not stop a stage."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash.diagnose import Answer, Trace, read_answer
from dflash.hypotheses import AS_CONFIGURED
from jobs import methods, verify
from jobs.base import devices
from jobs.base.config import load
from jobs.dataset.samples import load_rows
from jobs.proof import (
    engine_checks,
    greedy_requests,
    preflight_run,
)
from jobs.proof.round_comparison import Comparison
from serving.client import Completion
from serving.greedy import GreedyReport, Reading
from tests.helpers.tiny import make_target
from tests.helpers.work import configure, make_base


def completion(output, accepted, finish="length"):
    return Completion(
        request_id="cmpl-a",
        prompt_ids=[1, 2],
        output_ids=output,
        text="",
        finish_reason=finish,
        spec={
            "num_spec_steps": len(accepted or []),
            "num_accepted_draft_tokens": sum(accepted or []),
            "per_step_accepted": accepted,
            "per_step_drafted": accepted and [2] * len(accepted),
        },
        top_logprobs=[],
        started=0.0,
        seconds=0.0,
        decode_seconds=None,
    )


def answer(ids, num_prompt=2):
    return Answer(torch.tensor(ids), num_prompt, {}, torch.zeros(len(ids) - num_prompt))


def test_an_answer_that_fills_the_context_is_traced_without_its_uncounted_round():
    """It was once an IndexError: the counts had one more round than the drafts."""
    one = completion([5, 6, 7, 8], [1])  # vLLM counts no step for 8, which no draft had room for
    recorded = {"cmpl-a-0": [[6, 9], [0, 0]]}
    [found] = preflight_run.traces(["a"], [one], [answer([1, 2, 5, 6, 7, 8])], recorded)
    assert (found.accepted, found.drafts.tolist()) == ([1], [[6, 9]])


def test_a_served_answer_of_one_token_is_no_index_error():
    one = completion([5], None, "stop")
    [empty] = preflight_run.traces(["a"], [one], [answer([1, 2, 5])], {"cmpl-a-0": [[6, 9]]})
    ours: Any = None  # not used: there is nothing to compare
    check, found = engine_checks.check_drafts(ours, [empty])
    assert (check.status, found) == ("skip", {})
    assert "not checked" in check.found
    assert engine_checks.check_cache(ours, [empty], 256).status == "skip"


def test_own_rounding_is_measured_beside_an_answer_of_one_token(harvested, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight_run, "_special_tokens", lambda cfg: [])  # no tokenizer here
    cfg = configure(harvested, "target.dtype=bfloat16", "serve.max_model_len=100")
    folder = make_base(cfg, tmp_path / "drafter")
    rows = preflight_run.held_out(cfg, folder)[:2]
    ours = preflight_run.prepare(cfg, folder, rows)
    some, other = ours.answers
    prompt, first = some.ids[: some.num_prompt].tolist(), int(some.ids[some.num_prompt])
    one = read_answer(ours.target, ours.drafter.cfg, prompt, [first])
    drafts = torch.full((1, 2), 95)  # in neither answer, so nothing is accepted
    traces = [
        Trace("one token", one, [], torch.tensor([])),
        Trace("another", other, [0], drafts),
    ]
    assert preflight_run.with_noise(cfg, folder, ours, traces).noise.drafts == 2
    assert preflight_run.with_noise(cfg, folder, ours, traces[:1]) is ours
    found = engine_checks.compare(AS_CONFIGURED, ours.drafter, *ours.borrowed, traces)
    assert found.drafts == 2


@pytest.fixture
def long(harvested, tmp_path):
    """A configuration whose server has no room for the longest held-out samples, and a drafter."""
    cfg = configure(harvested, "serve.max_model_len=36", "methods.names=[ngram]")
    return cfg, make_base(cfg, tmp_path / "drafter")


def lengths(rows):
    return {len(row["prompt_ids"]) + len(row["output_ids"]) for row in rows}


def test_one_long_sample_stops_neither_preflight_nor_verify_nor_methods(
    long, tmp_path, monkeypatch, capfd
):
    """vLLM refused such a request with HTTP status 400, and that once ended the stage."""
    pytest.importorskip("vllm")
    cfg, folder = long
    everything = load_rows(cfg, "test")
    longest = max(lengths(everything))
    assert greedy_requests.longest(cfg, 4) == longest - 1
    kept: dict[str, Any] = {"preflight": preflight_run.held_out(cfg, folder)}

    def spy(name, place):
        def stop(*args):
            kept[name] = args[place]
            raise KeyboardInterrupt

        return stop

    monkeypatch.setattr(verify, "resolve", lambda *args: ("1", folder))
    monkeypatch.setattr(verify, "stored_walks", lambda cfg, sha, rows: (rows, {4: []}))
    monkeypatch.setattr(verify, "prove", spy("verify", 3))
    monkeypatch.setattr(methods, "compare_methods", spy("methods", 2))
    with pytest.raises(KeyboardInterrupt):
        verify.run(cfg)
    with pytest.raises(KeyboardInterrupt):
        methods.run(cfg.override("methods", k=[4]))
    for rows in kept.values():
        assert 0 < len(rows) < len(everything)
        assert max(lengths(rows)) < longest
    said = " ".join(capfd.readouterr().err.split())
    out = [r["sample_id"] for r in everything if lengths([r]) == {longest}]
    assert said.count(f"left out: {len(out)} of {len(everything)} held-out samples have") == 3
    assert sorted(out)[0] in said


def test_where_all_samples_are_too_long_the_setting_is_named():
    cfg = load(None, ["serve.max_model_len=20"])
    row = {"sample_id": "a", "prompt_ids": [1] * 10, "output_ids": [1] * 10}
    with pytest.raises(ValueError, match=r"1 of 1 held-out samples .*raise serve\.max_model_len"):
        greedy_requests.servable(cfg, [row], 4)


def test_verify_says_not_checked_of_short_answers_and_decodes_behind_the_servers(
    tmp_path, monkeypatch, capfd
):
    """Short answers were once `ok`, and servers lacked GPU memory that the decoder had used."""
    order = []

    @contextmanager
    def servers(*args):
        yield SimpleNamespace(most=1)
        order.append("servers are gone")

    def reference(*args):
        order.append("reference")
        return {"requests": 0, "identical": 0, "rounds": 0, "differing": [], "skipped": "none"}

    empty = Reading(gaps=[])
    measured = SimpleNamespace(
        answers=[completion([5, 6], [1])], k=4, costs=[], chosen=(4,), timed=(4,), speeds=[]
    )
    measured.text = GreedyReport(
        requests=1,
        identical=1,
        near_ties=[],
        different=[],
        control=empty,
        drafted=empty,
        bound=0.1,
        chance=1.0,
    )
    compared = Comparison(k=4, names=["a"], served=[[0]], replayed=[[0]], lengths=[2])
    compared.left_out.append("b[/b]")
    folder = make_base(
        configure(tmp_path, f"target.path={make_target(tmp_path / 't')}"), tmp_path / "d"
    )
    for name, value in {
        "require": lambda *args: SimpleNamespace(servers=1),
        "require_fit": lambda *args: order.append("fit"),
        "Servers": servers,
        "measure": lambda *args: measured,
        "commit_served": lambda *args: None,
        "compare_served": lambda *args: compared,
        "check_reference": reference,
    }.items():
        monkeypatch.setattr(verify, name, value)
    row = {"sample_id": "a", "domain": "x", "prompt_ids": [1], "output_ids": [5, 6]}
    row |= dict.fromkeys(("language", "thinking", "shaped"), None) | {"temperature": 0.0}
    result = verify.prove(configure(tmp_path), folder, "1", [row], {4: [[0]]})
    assert order == ["fit", "servers are gone", "reference"]
    assert not result["ok"]
    [fault] = result["faults"]
    assert fault.startswith("not checked: no served answer holds a whole block")
    verify.show(result)
    assert (
        "left out, since the engine drafted less than 4 tokens in a round: 1 (b[/b])"
        in " ".join(capfd.readouterr().err.split())
    )
    everywhere = Comparison(k=4, left_out=["a", "b"])
    monkeypatch.setattr(verify, "compare_served", lambda *args: everywhere)
    with pytest.raises(ValueError, match=r"drafted less than 4 tokens for 2 answers \(a, b\)"):
        verify.prove(configure(tmp_path), folder, "1", [row], {4: [[0]]})


@pytest.mark.parametrize("stage", ["verify", "preflight"])
def test_a_target_that_this_process_cannot_hold_is_refused_before_a_server_starts(
    harvested, tmp_path, monkeypatch, stage
):
    pytest.importorskip("vllm")
    cfg = configure(harvested, "serve.max_model_len=100")
    folder = make_base(cfg, tmp_path / "drafter")
    monkeypatch.setattr(devices, "free_bytes", lambda: 1000)
    for module in (preflight_run, verify):
        monkeypatch.setattr(module, "require", lambda *args: SimpleNamespace(servers=1))
    monkeypatch.setattr(preflight_run, "serve", lambda *args: pytest.fail("served"))
    monkeypatch.setattr(verify, "Servers", lambda *args: pytest.fail("served"))
    rows = preflight_run.held_out(cfg, folder)
    calls = {
        "preflight": lambda: preflight_run.try_on_engine(cfg, folder),
        "verify": lambda: verify.prove(cfg, folder, "1", rows, {4: [[0]] * len(rows)}),
    }
    with pytest.raises(
        ValueError,
        match=rf"{stage} runs .*the target takes .*0\.0 GiB are free",
    ):
        calls[stage]()
