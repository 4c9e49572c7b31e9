"""Real vLLM servers on the tiny target: same text with a drafter, captured traffic, refusals."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.agreement import tie_bound
from dflash.checkpoint import drafter_sha256, load_drafter
from dflash.decode import decode
from dflash.replay import Request as Recorded
from dflash.replay import replay
from dflash.target_model import load_target
from serving.client import Request, complete
from serving.greedy import judge, read_again
from serving.vllm_counts import rounds
from serving.vllm_server import Server
from tests.serving.conftest import LEARNED, TAPS, VOCABULARY

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SMALL: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_gib": 1}
# Three greedy requests share their batches with three that sample.
REQUESTS = [
    Request(
        prompt=prompt,
        max_tokens=24,
        temperature=1.0 if i % 2 else 0.0,
        seed=i,
        conversation=f"c{i}",
        domain="tiny",
        extra={"ignore_eos": True, **({"top_p": 0.9} if i == 5 else {})},
    )
    for i, prompt in enumerate(LEARNED)
]


@pytest.fixture(scope="module")
def plain(tiny_target, tmp_path_factory):
    """A server without a drafter."""
    with Server(tiny_target, log=tmp_path_factory.mktemp("plain") / "log", **SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def learned(tiny_target, learned_drafter, tmp_path_factory):
    """A server with a drafter that knows the greedy answers."""
    log = tmp_path_factory.mktemp("learned") / "log"
    with Server(tiny_target, drafter=learned_drafter, log=log, **SMALL) as server:
        assert server.k == (3,)
        yield server


@pytest.fixture(scope="module")
def models(tiny_target, learned_drafter):
    """The models of the second server, for the reference decoder and for replay."""
    return load_target(tiny_target, torch.float32), load_drafter(learned_drafter)


def greedy(answers):
    return [a for a, r in zip(answers, REQUESTS, strict=True) if r.temperature == 0]


def captured(folder: Path) -> dict[str, dict]:
    [path] = folder.glob("*.jsonl")
    return {row["conversation_id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_a_drafter_changes_no_greedy_text_and_every_answer_is_captured(
    tiny_target, tiny_drafter, plain, tmp_path
):
    with Server(
        tiny_target,
        drafter=tiny_drafter,
        k=(3, 3, 2),
        capture=tmp_path / "capture",
        drafter_version="v1",
        log=tmp_path / "drafted.log",
        **SMALL,
    ) as drafted:
        assert drafted.k == (3, 3, 2)
        expected = complete(plain.url, REQUESTS, 6)
        control = read_again(plain.url, greedy(expected), 2, "")
        answers = complete(drafted.url, REQUESTS, 6)
        reading = read_again(plain.url, greedy(answers), 2, "")
    bound = tie_bound(torch.float32)
    report = judge(greedy(expected), greedy(answers), control, reading, bound)
    assert (control.tokens, control.largest < bound) == (3 * 24, True)
    assert report.different == []
    assert report.identical + len(report.near_ties) == 3
    for answer in answers:
        accepted, drafts = rounds(answer)
        assert sum(count + 1 for count in accepted) == len(answer.output_ids) - 1 == 23
        assert max(drafts) <= 3
    rows = captured(tmp_path / "capture")
    assert len(rows) == len(REQUESTS)
    for request, answer in zip(REQUESTS, answers, strict=True):
        row = rows[str(request.conversation)]
        assert row["prompt_ids"] == request.prompt == answer.prompt_ids
        assert row["output_ids"] == answer.output_ids
        assert (row["domain"], row["drafter"], row["seed"]) == ("tiny", "v1", request.seed)
        assert (row["accepted"], row["drafted"]) == rounds(answer)
        assert row["drafter_sha256"] == drafter_sha256(tiny_drafter)


def test_where_k_is_0_nothing_is_drafted_and_a_smaller_batch_drafts_again(
    plain, tiny_target, learned_drafter, tmp_path
):
    """vLLM counts only steps that drafted. So an answer has fewer rounds than steps, and its tokens
    outside of those rounds came one by one.
    """
    log = tmp_path / "log"
    few = [r for r in REQUESTS if r.temperature == 0]
    with Server(tiny_target, drafter=learned_drafter, k=(3, 2, 0), log=log, **SMALL) as server:
        expected = complete(plain.url, few, 3)
        at_once = complete(server.url, few, 3)
        alone = complete(server.url, few, 1)
    for answers in (at_once, alone):
        assert [a.output_ids for a in answers] == [a.output_ids for a in expected]
    for answer in alone:
        accepted, drafted = rounds(answer)
        assert set(drafted[:-1]) == {3}
        assert sum(accepted) + len(accepted) == len(answer.output_ids) - 1
    counted = [(answer.spec or {})["per_step_accepted"] or [] for answer in at_once]
    in_rounds = sum(sum(accepted) + len(accepted) for accepted in counted)
    assert in_rounds < sum(len(answer.output_ids) - 1 for answer in at_once) / 2


def test_served_rounds_are_the_replayed_ones_greedy_and_sampled(learned, models):
    """Round by round, at temperature 0 and above: vLLM's greedy drafts are accepted exactly where
    they equal the text.
    """
    target, drafter = models
    answers = complete(learned.url, REQUESTS, 6)
    ids = [answer.prompt_ids + answer.output_ids for answer in answers]
    requests = [
        Recorded(torch.tensor(i), len(answer.prompt_ids), found.taps)
        for i, answer, found in zip(ids, answers, target.features(ids, TAPS), strict=True)
    ]
    walks = replay(drafter, target.embedding, target.head, requests, 3)
    assert walks == [rounds(answer)[0] for answer in answers]
    assert sum(map(sum, walks[0::2])) > 40, "the greedy answers are known by heart"
    assert sum(map(sum, walks[1::2])) > 0, "sampled answers have accepted drafts, too"


def ask(url, limits):
    """Answers to the learned prompts, each under each limit (fields of the request)."""
    requests = [
        Request(prompt=prompt, max_tokens=more.pop("max_tokens", 24), extra=more)
        for prompt in LEARNED
        for more in ({**limit(prompt)} for limit in limits)
    ]
    return complete(url, requests, 8)


def uncut(full, num_output):
    """What vLLM counts: whole rounds, until the answer is long enough."""
    found = []
    for count in full:
        if sum(found) + len(found) >= num_output - 1:
            break
        found.append(count)
    return found


@pytest.mark.parametrize("limit", [1, 2, 3, 6, 7, 8])
def test_a_length_limit_is_counted_as_vllm_counts_it(learned, models, limit):
    """Prefill alone, answers shorter than a block, and limits inside an accepted run: vLLM counts
    whole rounds, we cut them, and the reference decoder under the same limit agrees.
    """
    target, drafter = models
    answers = ask(learned.url, [lambda _: {"max_tokens": limit, "ignore_eos": True}])
    for prompt, answer in zip(LEARNED, answers, strict=True):
        full = decode(target, prompt, 24, (), drafter, 3)
        real = decode(target, prompt, limit, (), drafter, 3)
        assert answer.output_ids == real.output_ids == full.output_ids[:limit]
        assert answer.spec is not None
        assert (answer.spec["per_step_accepted"] or []) == uncut(full.accepted, limit)
        assert rounds(answer)[0] == real.accepted


@pytest.mark.parametrize("place", [4, 5, 6, 7])
def test_an_end_inside_an_accepted_run_is_counted_as_vllm_counts_it(learned, models, place):
    """A stop token id works like the end of text: vLLM counts drafts that match after it, not we.
    With a stop string, the ids end with the token that completes it; vLLM reports no counts then.
    """
    target, drafter = models
    fulls = {tuple(p): decode(target, p, 24, (), drafter, 3) for p in LEARNED}
    end = {prompt: full.output_ids[place] for prompt, full in fulls.items()}
    answers = ask(
        learned.url,
        [
            lambda prompt: {"stop_token_ids": [end[tuple(prompt)]], "ignore_eos": True},
            lambda prompt: {"stop": [f"w{end[tuple(prompt)]}"], "ignore_eos": True},
        ],
    )
    for prompt, by_id, by_text in zip(LEARNED, answers[0::2], answers[1::2], strict=True):
        full, token = fulls[tuple(prompt)], end[tuple(prompt)]
        real = decode(target, prompt, 24, (token,), drafter, 3)
        assert by_id.output_ids == real.output_ids
        assert by_id.spec is not None
        counted = by_id.spec["per_step_accepted"] or []
        assert counted == uncut(full.accepted, len(real.output_ids))
        assert rounds(by_id)[0] == real.accepted
        words = [f"w{t}" for t in full.output_ids]
        first = next(i for i, word in enumerate(words) if word.startswith(f"w{token}"))
        assert by_text.output_ids == full.output_ids[: first + 1]
        assert by_text.spec is None
        with pytest.raises(ValueError, match="not by stop strings"):
            rounds(by_text)


def test_an_answer_that_fills_the_context_has_all_its_rounds(learned):
    prompt = [(7 * i) % VOCABULARY for i in range(SMALL["max_model_len"] - 9)]
    request = Request(prompt=prompt, max_tokens=9, extra={"ignore_eos": True})
    [answer] = complete(learned.url, [request], 1)
    accepted, drafted = rounds(answer)
    assert sum(accepted) + len(accepted) == len(answer.output_ids) - 1 == 8
    assert answer.spec is not None
    assert drafted[-1] < 3, "there is no room for three drafts"
    print(answer.spec, drafted)


def test_without_the_plugin_a_drafter_is_refused(tiny_target, tiny_drafter, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "")
    server = Server(tiny_target, drafter=tiny_drafter, log=tmp_path / "serve.log", **SMALL)
    message = r"wrongly \(key_norm.*expansion.*dflash_cpu_fixes"
    with pytest.raises(ValueError, match=message), server:
        pass
    assert server._process is None


def test_a_killed_parent_takes_its_server_along(tiny_target, tmp_path):
    code = (
        "import sys, time; from serving.vllm_server import Server\n"
        f"s = Server({str(tiny_target)!r}, log={str(tmp_path / 'serve.log')!r}, "
        "max_model_len=128, kv_cache_gib=1)\n"
        "s.start(); s.wait_until_ready(); print(s._process.pid, s.url, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        group, url = parent.stdout.readline().split()
        assert urllib.request.urlopen(f"{url}/health").status == 200
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and _group_lives(int(group)):
        time.sleep(0.2)
    assert not _group_lives(int(group))


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_vllm_and_transformers_give_the_same_features(tiny_target):
    # In a process of its own: the engine lives as long as its process. Batches of 64 tokens cut
    # the longest prompt into chunks.
    code = f"""
import torch
from dflash.target_model import load_target
from serving.extract import Extractor
taps, generator = {TAPS}, torch.Generator().manual_seed(0)
batch = [torch.randint({VOCABULARY}, (n,), generator=generator).tolist() for n in (1, 7, 64, 150)]
engine = Extractor({str(tiny_target)!r}, taps, torch.float32, kv_cache_gib=1, max_batch_tokens=64)
reference = load_target({str(tiny_target)!r}, torch.float32).features(batch, taps)
for _ in range(2):
    for ours, theirs in zip(engine.features(batch, taps), reference, strict=True):
        torch.testing.assert_close(ours.taps, theirs.taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.last, theirs.last, rtol=1e-4, atol=1e-4)
longest = (batch[3] * 9)[: engine.room()]
assert len(engine.features([longest], taps)[0].taps) == len(longest), "an answer may be so long"
try:
    engine.features([[*longest, 1]], taps)
except Exception as error:
    print("refused:", error)
try:
    engine.features(batch, (1, 2))
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "this engine reads taps [1, 3], not [1, 2]" in done.stdout
    assert "refused:" in done.stdout, "vLLM takes more: `room` may grow"
