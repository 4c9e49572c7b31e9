"""Faults planted in a running vLLM, each recognised by the drafts that it made."""

import json
import subprocess
import sys

import pytest
import torch

from dflash.checkpoint import read_config, save_drafter
from dflash.decode import decode
from dflash.diagnose import Trace, compare, explain, read_answer
from dflash.hypotheses import AS_CONFIGURED, hypotheses
from dflash.replay import Request
from dflash.target import load_target
from dflash.train import generator
from serving.acceptance import rounds
from serving.client import Completion
from serving.drafts import drafted, read_drafts
from tests.serving.faulty_engine import MAX_TOKENS, OTHER_MASK, OTHER_THETA
from tests.tiny import learn

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
BOUND = 1e-3


@pytest.fixture(scope="module")
def target(tiny_target):
    return load_target(tiny_target, torch.float32)


@pytest.fixture(scope="module")
def config(tiny_drafter):
    return read_config(tiny_drafter)


@pytest.fixture(scope="module")
def requests(target, config):
    """Greedy answers of the target: what is served, and what the drafter learns by heart."""
    found = []
    for i in range(12):
        prompt = torch.randint(6, 120, (5 + i,), generator=generator("faults", i)).tolist()
        ids = [*prompt, *decode(target, prompt, MAX_TOKENS).output_ids]
        features = target.features([ids], config.target_layer_ids)[0].taps.clone()
        found.append(Request(torch.tensor(ids), len(prompt), features))
    return found


@pytest.fixture(scope="module")
def drafter(requests, target, config):
    return learn(config, target, requests, steps=70)


@pytest.fixture(scope="module")
def served(requests, drafter, tiny_target, tmp_path_factory):
    """What one vLLM drafted under every fault, by the fault's name."""
    folder = tmp_path_factory.mktemp("faults")
    prompts = [r.ids[: r.num_prompt].tolist() for r in requests]
    everything = [token for r in requests for token in r.ids.tolist()]
    asked = folder / "prompts.json"
    asked.write_text(json.dumps({"short": prompts, "long": [everything[:400]]}))
    path = save_drafter(drafter, folder / "drafter", torch.float32)
    command = [sys.executable, "-m", "tests.serving.faulty_engine", str(tiny_target), str(path)]
    done = subprocess.run(
        [*command, str(asked), str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return lambda name: (
        [completion(row) for row in json.loads((folder / f"{name}.json").read_text())],
        read_drafts(folder / f"{name}.jsonl"),
    )


def completion(row):
    unused = {"text": "", "finish_reason": "length", "top_logprobs": [], "started": 0.0}
    unused |= {"seconds": 0.0, "decode_seconds": None}
    row = {name: row[name] for name in ("request_id", "prompt_ids", "output_ids", "spec")}
    return Completion(**row, **unused)


@pytest.fixture(scope="module")
def traces(served, target, config):
    """Traces of a fault; each checks that its drafts give the counts that vLLM reports."""

    def made(name):
        answers, recorded = served(name)
        return [
            Trace(
                a.request_id,
                read_answer(target, config, a.prompt_ids, a.output_ids),
                rounds(a)[0],
                torch.tensor(drafted(a, recorded)),
            )
            for a in answers
        ]

    return made


def table(config):
    return hypotheses(config, [OTHER_THETA], [OTHER_MASK, 7])


def own_share(drafter, target, traces):
    own = compare(AS_CONFIGURED, drafter, target.embedding, target.head, traces)
    return own, own.share(BOUND)


def test_a_healthy_engine_drafts_what_we_draft_token_by_token(traces, drafter, target):
    found = traces("healthy")
    own, share = own_share(drafter, target, found)
    assert share == 1.0
    assert own.drafts > 300
    assert len(own.near_ties(BOUND)) < 0.01 * own.drafts
    assert sum(sum(t.accepted) for t in found) > 100, "nothing is accepted: a weak test"
    assert max(float(t.answer.gaps.max()) for t in found) < BOUND, "the engine serves our target"


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("taps", "taps +1"),
        ("key_norm", "key norm"),
        ("theta", "rope_theta 1e+06"),
        ("interleaved", "rope interleaved"),
        ("mask", f"mask_token_id {OTHER_MASK}"),
        ("causal", "is_causal 1"),
        ("position", "position +1"),
        ("slots", "slots shifted"),
    ],
)
def test_a_planted_fault_is_recognised(traces, drafter, target, config, fault, name):
    found = traces(fault)
    assert own_share(drafter, target, found)[1] < 0.99
    cause, ranking = explain(table(config), drafter, target.embedding, target.head, found, BOUND)
    assert cause is not None, [(h.name, share) for h, share in ranking]
    assert cause.name == name, [(h.name, share) for h, share in ranking]


def test_other_weights_are_caught_and_blamed_on_no_known_fault(traces, drafter, target, config):
    found = traces("weights")
    assert own_share(drafter, target, found)[1] < 0.99
    cause, _ = explain(table(config), drafter, target.embedding, target.head, found, BOUND)
    assert cause is None


def test_another_target_shows_in_the_text(served, target, config):
    answers, _ = served("target")
    gaps = [read_answer(target, config, a.prompt_ids, a.output_ids).gaps.max() for a in answers]
    assert float(max(gaps)) > BOUND


def test_drafts_after_a_cached_prefix_are_ours_and_stale_keys_are_caught(
    served, traces, drafter, target
):
    assert own_share(drafter, target, traces("cold"))[1] == 1.0
    assert own_share(drafter, target, traces("warm"))[1] == 1.0
    assert own_share(drafter, target, traces("stale"))[1] < 0.9
