"""Three windows of shifting traffic on a live fleet: tickets, then orders too, then orders alone.

Real target, real vLLM behind Ray Serve, a real MLflow server, and `flywheel retrain` as a command.
It begins with a fleet without a drafter. Most of an hour on two cores: `make test-windows`. It
leaves windows.json and windows.svg (served tau over time) in its work folder.
"""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib.pyplot as plt
import pytest

from jobs import ingest, target
from jobs.base.config import Config, commented, load
from jobs.dataset.queries import ask, find_question
from jobs.demo_data.prompts import prompts
from pipelines.demo_fleet import Clients, fleet_of
from store import promotions, windows
from tests.helpers import mlflow_server

pytestmark = [pytest.mark.hours, pytest.mark.e2e, pytest.mark.timeout(5400)]

NEW, MORE = 80, 300
"""Prompts of a domain that a window begins with, and those that stream while it rolls out."""
MIXES = (("tickets",), ("tickets", "orders"), ("orders",))
BIN_SECONDS = 60


@pytest.fixture(scope="module")
def cfg(tmp_path_factory, empty_database) -> Iterator[Config]:
    folder = tmp_path_factory.mktemp("windows")
    gate = folder / "gate.yaml"
    gate.write_text("domains: {max_loss: 0.15, visible: 1.0}\n")  # a dozen conversations judge
    with mlflow_server.running(folder, empty_database) as url:
        settings = [
            f"work={folder / 'work'}",
            f"mlflow.uri={url}",
            f"promote.gate={gate}",
            f"serve.capture={folder / 'capture'}",
            f"ingest.logs={folder / 'capture'}",
            "ingest.test_percent=20",
            "train.steps=90",
            "retrain.min_tokens=3000",
            "retrain.minutes=2",
            "verify.repeats=1",
            "serve.kv_cache_gib=1",  # `verify` starts servers beside the fleet
            "rollout.poll=2",
            "rollout.max_loss=0.15",
            "rollout.max_slice_loss=0.3",
            "rollout.min_share=0.2",
        ]
        yield load(None, settings)


def retrain(cfg: Config, name: str, *more: str) -> dict:
    """One `flywheel retrain`, as a scheduler would start it."""
    file, log = cfg.path("retrain.yaml"), cfg.path(f"{name}.log")
    file.write_text(commented(cfg))
    command = [sys.executable, "-m", "pipelines.retrain", "--config", str(file), *more]
    with log.open("wb") as stream:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stream, check=False)
    assert done.returncode == 0, log.read_text(errors="replace")[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def looking(cfg: Config) -> Iterator[None]:
    """Leaves the picture and the numbers, whatever came of the test."""
    try:
        yield
    finally:
        ingest.run(cfg)
        if cfg.table("acceptance").version():  # something was drafted
            gains = ask(cfg, find_question("gain_of_windows").read_text()).to_pylist()
            told = json.dumps(gains, indent=1, default=str)
            cfg.path("windows.json").write_text(told)
            print(told)
            draw(cfg)


def test_three_windows_on_a_live_fleet(cfg):
    target.run(cfg)
    found = []
    with fleet_of(cfg) as endpoint, Clients(cfg, endpoint) as clients, looking(cfg):
        for number, mix in enumerate(MIXES, 1):
            for domain in mix:
                clients.send(prompts(domain, NEW, seed=number))
            # Nobody asks while it trains, so the roll-out has to wait for traffic.
            waiting = retrain(cfg, f"{number}a", "rollout.wait=1")
            assert (waiting["window"], waiting["state"]) == (number, "waiting"), waiting
            with clients.streaming(dict.fromkeys(mix, MORE)):
                found.append(retrain(cfg, f"{number}b", "rollout.wait=900"))
    asked = clients.summary()
    assert asked["requests"].get("failed", 0) == 0, asked["faults"]
    assert [one["window"] for one in found] == [1, 2, 3]
    assert [one["state"] for one in found][:2] == ["promoted", "promoted"], found
    known = windows.read(cfg.table("windows"))
    assert known[1].numbers("train")["base"] == "1"
    assert known[1].numbers("train")["settings"]["domain"] == "orders"
    gains = json.loads(cfg.path("windows.json").read_text())
    for gain in gains[:2]:
        assert gain["predicted_low"] <= gain["served_gain"] <= gain["predicted_high"], gain


def draw(cfg: Config) -> None:
    """Served tokens per round of each domain, by minute, and what was decided."""
    rows = cfg.table("acceptance").read().to_pylist()
    rows = [row for row in rows if row["log"] is not None and row["accepted"]]
    start = min(row["finished_at"] for row in rows)
    bins: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        at = int((row["finished_at"] - start).total_seconds() // BIN_SECONDS)
        bins[row["domain"], at][0] += sum(row["accepted"]) + len(row["accepted"])
        bins[row["domain"], at][1] += len(row["accepted"])
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for domain, marker in zip(sorted({name for name, _ in bins}), "osD", strict=False):
        points = sorted((at, a / b) for (name, at), (a, b) in bins.items() if name == domain)
        axes.plot(*zip(*points, strict=True), marker, label=domain)
    for row in promotions.read(cfg.table("promotions")):
        if row["action"] in ("rollout-canary", "rollout-advance", "rollout-rollback"):
            at = (row["decided_at"] - start).total_seconds() / BIN_SECONDS
            text = f"{row['to_version']}: {row['action'].removeprefix('rollout-')}"
            axes.axvline(at, color="#bbbbbc", linewidth=0.8, zorder=0)
            axes.text(at, 1.01, text, rotation=45, fontsize=7, transform=axes.get_xaxis_transform())
    axes.set(xlabel="minutes since the first drafted answer", ylabel="served tokens per round")
    axes.axhline(1, color="#767677", linewidth=0.8, linestyle=":")
    axes.legend()
    figure.savefig(cfg.path("windows.svg"))
