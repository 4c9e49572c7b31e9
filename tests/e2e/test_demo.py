"""The whole loop on the real target and a real vLLM, in both dtypes: bfloat16, for hardware with
bfloat16 products, and float32, for the rest. The float32 run is killed on the way, resumed and then
reused. The bfloat16 run is left out on a CPU that emulates it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs.base.config import load
from tests.helpers.tiny import native_bfloat16

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(2400)]

SETTINGS = [
    "demo.tickets=60",
    "demo.general=5",
    "demo.max_tokens=48",
    "ingest.test_percent=20",
    "train.steps=50",
    "train.val_every=50",
    "train.val_samples=8",
    "train.checkpoint_every=10",
    "verify.reference_requests=1",
    "verify.repeats=1",
    f"promote.gate={Path(__file__).with_name('gate.yaml')}",
]


def command(work, dtype):
    dtypes = [f"target.dtype={dtype}", f"train.dtype={dtype}"]
    settings = [f"work={work}", *dtypes, *SETTINGS]
    return [sys.executable, "-m", "pipelines.demo", *settings]


def run_demo(work, dtype, log):
    with open(log, "wb") as stream:
        done = subprocess.run(
            command(work, dtype), stdout=subprocess.PIPE, stderr=stream, check=False
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def kill_when(work, dtype, log, happened):
    """Start the demo and SIGKILL its process group as soon as `happened()`."""
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            command(work, dtype), stdout=stream, stderr=stream, start_new_session=True
        )
    while not happened():
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=native_bfloat16)])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def work(tmp_path_factory, dtype):
    return tmp_path_factory.mktemp(f"demo-{dtype}")


@pytest.fixture(scope="module")
def summary(work, dtype):
    """float32: killed while traffic flows, killed again while training, then left to finish."""
    captured = work / "capture"
    if dtype == "float32":
        kill_when(work, dtype, work / "first.log", lambda: _lines(captured) > 30)
        kill_when(work, dtype, work / "second.log", lambda: any(work.glob("runs/*/step-*.pt")))
        assert 65 <= _lines(captured) <= 67, "requests that were captured before were sent again"
    return run_demo(work, dtype, work / "third.log")


def _lines(folder):
    return sum(len(path.read_bytes().splitlines()) for path in folder.glob("*.jsonl"))


def test_served_acceptance_is_the_replayed_one(summary, dtype):
    assert summary["ok"], summary["faults"]
    replayed, served = summary["tau_replay"], summary["tau_served"]
    assert served["pooled"] == pytest.approx(replayed["pooled"], rel=0.01)
    for ours, theirs in zip(replayed["positions"], served["positions"], strict=True):
        assert ours == pytest.approx(theirs, abs=0.02)  # some 150 rounds: three of them
    same = summary["same_text"]
    assert same["requests"] == summary["requests"], "the served text is replayed, whatever it is"
    # Two right computations in bfloat16 differ at a near tie about once in a hundred rounds.
    assert summary["comparison"]["differing_rounds"] <= 0.05 * summary["rounds"]
    if dtype == "float32":
        assert same["identical_rounds"] >= 0.9 * same["requests"]


def test_replay_is_the_reference_decoder(summary):
    assert summary["reference"]["identical"] == summary["reference"]["requests"] >= 1


def test_the_drafter_learned_and_never_changed_the_text(summary):
    assert summary["tau_first"]["pooled"] < 1.2 < summary["tau_full_k"]["domains"]["tickets"]
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


def test_every_stage_left_a_row(summary, work):
    rows = load(None, [f"work={work}"]).table("stages").read(["stage", "ok"]).to_pylist()
    done = {row["stage"] for row in rows if row["ok"]}
    assert done == {"ingest", "select", "harvest", "train", "evaluate", "promote", "verify"}


def test_a_second_run_reuses_everything(summary, work, dtype):
    if dtype != "float32":
        pytest.skip("the same code: once is enough")
    written = written_at(work)
    again = run_demo(work, dtype, work / "fourth.log")
    assert again["tau_served"] == summary["tau_served"]
    assert again["seconds"]["total"] < 0.5 * summary["seconds"]["total"]
    assert written_at(work) == written


def written_at(work):
    """When captured logs, traffic, features, training states and drafters were written, and which
    selection counts.
    """
    names = ("capture", "traffic", "features", "runs", "drafters")
    files = [path for name in names for path in (work / name).rglob("[!.]*.*")]
    kinds = {path.suffix for path in files}
    assert {".jsonl", ".parquet", ".pt", ".safetensors"} <= kinds
    data = [path for path in files if path.suffix != ".json"]  # harvest notes when it looked
    selection = load(None, [f"work={work}"]).table("selection").version()
    return {path: path.stat().st_mtime_ns for path in data} | {"selection": selection}
