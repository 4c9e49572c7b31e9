"""`flywheel methods` with real servers on the tiny target: none, n-gram lookup, and DFlash."""

import json

import pytest
import torch

from dflash.decode import decode
from dflash.target_model import load_target
from jobs import ingest, methods, select
from jobs.base.config import load
from jobs.proof import method_runs
from serving.vllm_counts import rounds
from tests.helpers.work import record
from tests.serving.conftest import ANSWER, LEARNED

pytest.importorskip("vllm")
pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cfg(tmp_path_factory, ray_cluster, tiny_target, learned_drafter):
    """Settings of a run whose held-out prompts are the ones that the drafter has learned."""
    work = tmp_path_factory.mktemp("methods")
    target = load_target(tiny_target, torch.float32)
    (work / "capture").mkdir()
    with open(work / "capture" / "log.jsonl", "w") as log:
        for i, prompt in enumerate(LEARNED):
            output = decode(target, prompt, ANSWER, [1]).output_ids
            end = {"finish_reason": "stop" if output[-1] == 1 else "length"}
            log.write(json.dumps(record(i, prompt, output) | end))
            log.write("\n")
    settings = [
        f"work={work}",
        f"target.path={tiny_target}",
        "target.dtype=float32",
        "drafter.taps=[1,3]",
        "ingest.test_percent=99",
        "ingest.val_percent=0",
        "serve.max_model_len=128",
        "serve.kv_cache_gib=1",
        "verify.requests=3",
        "verify.repeats=2",
        "methods.names=ngram,mtp,dflash",
        "methods.ngram_min=1",
        f"methods.dflash={learned_drafter}",
    ]
    found = load(None, settings)
    ingest.run(found)
    select.run(found)
    return found


@pytest.fixture(scope="module")
def result(cfg):
    """The summary, and each method's answers as its server gave them."""
    answers = {}

    def spy(cfg, url, rows, label):
        found = real(cfg, url, rows, label)
        answers[label] = found[0]
        return found

    real = method_runs.ask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(method_runs, "ask", spy)
        summary = methods.run(cfg)
    return {row["method"]: row for row in summary["methods"]}, answers


def test_rounds_are_counted_alike_for_every_method(result):
    """Only the engine's counter includes steps without a draft. If every step has drafts, it equals
    the sum over requests.
    """
    found, answers = result
    assert found["none"]["tau"]["pooled"] == 1.0
    dflash, ngram = found["dflash"], found["ngram"]
    assert dflash["rounds"] == sum(len(rounds(answer)[0]) for answer in answers["dflash"])
    assert dflash["rounds_with_drafts"] == dflash["rounds"]
    assert dflash["tau"]["pooled"] > 2, "it knows these answers by heart"
    assert ngram["rounds_with_drafts"] < ngram["rounds"] <= ngram["tokens"]
    assert ngram["tau"]["pooled"] < ngram["vllm_mean_acceptance_length"]
    assert set(ngram["tau"]["domains"]) == {"a", "b"}


def test_text_speed_and_latency_are_there(result):
    found, _ = result
    for name in ("ngram", "dflash"):
        greedy, speeds = found[name]["greedy"], found[name]["speeds"]
        assert greedy["different"] == 0
        assert greedy["identical"] + greedy["near_ties"] == len(LEARNED)
        assert [one["concurrency"] for one in speeds] == [1, 8]
        assert [one["latency"]["requests"] for one in speeds] == [2, 6]
        assert all(0 < one["latency"]["median"] <= one["latency"]["p95"] for one in speeds)
        assert all(one["ratio"] > 0 for one in speeds)
    assert [len(one["plain"]) for one in found["none"]["speeds"]] == [4, 4]
    assert found["mtp"]["available"] is False
    assert "no MTP heads" in found["mtp"]["reason"]


def test_a_second_run_finds_the_result(result, cfg, monkeypatch):
    monkeypatch.setattr(method_runs, "compare_methods", lambda *args: pytest.fail("measured again"))
    assert methods.run(cfg)["reused"]
    [path] = cfg.path("methods").glob("*.json")
    parts = path.with_suffix("")
    assert {part.name for part in parts.iterdir()} == {"ngram.json", "dflash.json"}
    rows = json.loads(path.read_text())["methods"]
    assert [row["method"] for row in rows] == ["none", "ngram", "mtp", "dflash"]
