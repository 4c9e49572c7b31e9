"""The whole loop on the real target and a real vLLM: killed on the way, continued, then reused."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

SETTINGS = [
    "demo.tickets=80",
    "demo.general=10",
    "demo.max_tokens=64",
    "train.steps=70",
    "train.val_every=35",
    "train.checkpoint_every=20",
    "train.val_samples=8",
    "verify.repeats=1",
    "verify.reference_requests=2",
    "ingest.test_percent=15",
]


def command(work):
    return [sys.executable, "-m", "pipelines.demo", f"work={work}", *SETTINGS]


def run_demo(work, log):
    with open(log, "wb") as stream:
        done = subprocess.run(command(work), stdout=subprocess.PIPE, stderr=stream, check=False)
    assert done.returncode == 0, log.read_text(errors="replace")[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def kill_when(work, log, happened):
    """Start the demo and SIGKILL its process group as soon as `happened()`."""
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            command(work), stdout=stream, stderr=stream, start_new_session=True
        )
    while not happened():
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def summary(work):
    """Killed while traffic flows, killed again while training, then left to finish."""
    captured = work / "capture"
    kill_when(work, work / "first.log", lambda: _lines(captured) > 30)
    kill_when(work, work / "second.log", lambda: any(work.glob("runs/*/step-*.pt")))
    assert 90 <= _lines(captured) <= 92, "requests that were captured before were sent again"
    return run_demo(work, work / "third.log")


def _lines(folder):
    return sum(len(path.read_bytes().splitlines()) for path in folder.glob("*.jsonl"))


def test_served_acceptance_is_the_replayed_one(summary):
    replayed, served = summary["tau_replay"], summary["tau_served"]
    assert served["pooled"] == pytest.approx(replayed["pooled"], rel=0.02)
    for ours, theirs in zip(replayed["positions"], served["positions"], strict=True):
        assert ours == pytest.approx(theirs, abs=0.02)
    same = summary["same_text"]
    assert same["identical_rounds"] >= 0.9 * same["requests"]


def test_replay_is_the_reference_decoder(summary):
    assert summary["reference"]["identical"] == summary["reference"]["requests"] == 2


def test_the_drafter_learned_and_never_changed_the_text(summary):
    assert summary["tau_first"]["pooled"] < 1.2
    assert summary["tau_full_k"]["domains"]["tickets"] > 1.5
    greedy = summary["greedy"]
    assert greedy["different"] == 0
    assert greedy["identical"] + greedy["near_ties"] == greedy["requests"] == summary["requests"]


def test_the_summary_has_what_the_readme_promises(summary, work):
    assert json.loads((work / "summary.json").read_text()) == summary
    assert set(summary["speedup"]) == {"1", "8"}
    assert 1 <= summary["k"] <= 7
    assert summary["drafter"]["layers"] == 2
    assert summary["seconds"]["total"] > 0
    assert (work / summary["report"]).read_text().startswith("<!doctype html>")


def test_a_second_run_reuses_everything(summary, work):
    again = run_demo(work, work / "fourth.log")
    assert again["tau_served"] == summary["tau_served"]
    assert again["seconds"]["total"] < 0.5 * summary["seconds"]["total"]
    assert again["seconds"]["train"] < 15
