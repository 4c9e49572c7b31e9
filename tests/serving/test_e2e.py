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

from serving.acceptance import rounds
from serving.client import Request, complete
from serving.greedy import greedy_check
from serving.server import Server
from tests.serving.conftest import TAPS, VOCABULARY

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SMALL: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_gib": 1}
# Three greedy requests share their batches with three that sample.
REQUESTS = [
    Request(
        prompt=[0, 5 + i, 9, 20 + i],
        max_tokens=24,
        temperature=1.0 if i % 2 else 0.0,
        seed=i,
        conversation=f"c{i}",
        domain="tiny",
        extra={"ignore_eos": True},
    )
    for i in range(6)
]


def greedy(answers):
    return [a for a, r in zip(answers, REQUESTS, strict=True) if r.temperature == 0]


def captured(folder: Path) -> dict[str, dict]:
    [path] = folder.glob("*.jsonl")
    return {row["conversation_id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_a_drafter_changes_no_greedy_text_and_every_answer_is_captured(
    tiny_target, tiny_drafter, tmp_path
):
    with (
        Server(tiny_target, log=tmp_path / "plain.log", **SMALL) as plain,
        Server(
            tiny_target,
            drafter=tiny_drafter,
            k=(3, 3, 2),
            capture=tmp_path / "capture",
            drafter_version="v1",
            log=tmp_path / "drafted.log",
            **SMALL,
        ) as drafted,
    ):
        assert drafted.k == (3, 3, 2)
        expected = complete(plain.url, REQUESTS, 6)
        answers = complete(drafted.url, REQUESTS, 6)
        report = greedy_check(plain.url, greedy(expected), greedy(answers))
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
        assert row["spec"] == answer.spec


def test_without_the_plugin_a_drafter_is_refused(tiny_target, tiny_drafter, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "")
    server = Server(tiny_target, drafter=tiny_drafter, log=tmp_path / "serve.log", **SMALL)
    message = r"wrongly \(key_norm.*expansion.*dflash_cpu_fixes"
    with pytest.raises(ValueError, match=message), server:
        pass
    assert server._process is None


def test_a_killed_parent_takes_its_server_along(tiny_target, tmp_path):
    code = (
        "import sys, time; from serving.server import Server\n"
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
    deadline = time.monotonic() + 30
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
from dflash.target import load_target
from serving.extract import Extractor
taps, generator = {TAPS}, torch.Generator().manual_seed(0)
batch = [torch.randint({VOCABULARY}, (n,), generator=generator).tolist() for n in (1, 7, 64, 150)]
engine = Extractor({str(tiny_target)!r}, taps, torch.float32, kv_cache_gib=1, max_batch_tokens=64)
reference = load_target({str(tiny_target)!r}, torch.float32).features(batch, taps)
for _ in range(2):
    for ours, theirs in zip(engine.features(batch, taps), reference, strict=True):
        torch.testing.assert_close(ours.taps, theirs.taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.last, theirs.last, rtol=1e-4, atol=1e-4)
try:
    engine.features(batch, (1, 2))
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "this engine reads taps [1, 3], not [1, 2]" in done.stdout
