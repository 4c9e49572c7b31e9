"""flywheel demo-fleet

Goes on from a finished `flywheel demo`: two replicas behind one endpoint serve its champion, new
traffic of another kind arrives, a second drafter is trained from the first, promoted and rolled out
by evidence while clients stream. Then a bad drafter (right shape, random weights) is forced into
the registry; the canary stops it, and registry and fleet go back. Every step is a command that a
user would give. Ends with a table, the pictures of both roll-outs, and <work>/fleet.json.
"""

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from dflash.checkpoint import compat_fields, compat_key, drafter_sha256, read_config, save_drafter
from dflash.identity import target_id
from dflash.model import new_drafter
from jobs import evaluate, harvest, ingest, promote, rollout, select, train
from jobs.base.cli import run_as_module
from jobs.base.cluster import cluster
from jobs.base.config import Config, commented
from jobs.base.console import console, print_table
from jobs.base.stage_log import logged
from jobs.demo_data.prompts import Prompt, prompts
from jobs.promotion.champion_moves import promoting
from jobs.reconciling.observed import FLEET_STATE
from jobs.registry.versions import CHAMPION, COMPAT, FIELDS, SHA256, resolve
from serving.vllm_server import SERVED_NAME
from store.place import write_json

LEARN: list[tuple[str, Callable[[Config], dict[str, Any]]]] = [
    ("ingest", ingest.run),
    ("select", select.run),
    ("harvest", harvest.run),
    ("train", train.run),
    ("evaluate", evaluate.run),
    ("promote", promote.run),
]
START_SECONDS = 600.0
MIX = {"orders": 600, "tickets": 300}
"""While it rolls out, both domains are judged."""


def run(cfg: Config) -> dict[str, Any]:
    """Run it once; returns the content of fleet.json.

    Raises ValueError without a champion, and where a step does not end as it must.
    """
    champion = resolve(cfg, CHAMPION)
    if champion is None:
        raise ValueError(f"{cfg.place()} has no champion: run `flywheel demo` with it first")
    cfg = _settings(cfg, champion[1])
    seconds: dict[str, float] = {}
    done: dict[str, Any] = {"first": champion[0]}
    with _timed(seconds, "fleet"), fleet_of(cfg) as endpoint, Clients(cfg, endpoint) as clients:
        with _timed(seconds, "new traffic"):
            clients.send(prompts("orders", cfg.demo.orders, cfg.demo.seed))
        with cluster(cfg):
            for name, stage in LEARN:
                with _timed(seconds, name):
                    done[name] = logged(cfg, name, stage)
        if not done["promote"]["ok"]:
            raise ValueError("the gate refused the second drafter: its reasons are above")
        with clients.streaming(MIX), _timed(seconds, "rollout"):
            done["rollout"] = logged(cfg, "rollout", rollout.run)
        force(cfg, _random_drafter(cfg, champion[1]))
        with clients.streaming(MIX), _timed(seconds, "bad rollout"):
            done["bad"] = logged(cfg, "rollout", rollout.run)
        done["clients"] = clients.summary()
    summary = _summary(done, seconds)
    _show(summary)
    return write_json(cfg.place(), "fleet.json", summary)


def _settings(cfg: Config, base: Path) -> Config:
    """Capture of the fleet, training from the champion, patience of a demo."""
    capture = cfg.path("capture_fleet")
    cfg = cfg.override("serve", drafter="champion", capture=str(capture))
    cfg = cfg.override("ingest", logs=[str(cfg.path("capture")), str(capture)])
    cfg = cfg.override("train", base=str(base), steps=cfg.demo.more_steps)
    cfg = cfg.override("promote", gate=str(Path(__file__).with_name("demo_fleet_gate.yaml")))
    # Tolerances that a few hundred requests can decide: with the defaults it takes thousands
    # (docs/explanation/rollout.md), and two cores answer about one a second.
    return cfg.override(
        "rollout", poll=2.0, wait=600, max_loss=0.15, max_slice_loss=0.3, min_share=0.2
    )


@contextmanager
def fleet_of(cfg: Config) -> Iterator[str]:
    """`flywheel fleet` as a process of its own; gives the endpoint once it serves."""
    settings, log = cfg.path("demo_fleet.yaml"), cfg.path("server_logs", "fleet.log")
    settings.write_text(commented(cfg))
    state = cfg.path(FLEET_STATE)
    state.unlink(missing_ok=True)
    command = [sys.executable, "-m", "jobs.fleet", "--config", str(settings)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not state.is_file() or len(json.loads(state.read_text())["replicas"]) < 2:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ValueError(f"the fleet did not start; log: {log}")
            time.sleep(0.5)
        yield json.loads(state.read_text())["endpoint"]
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


class Clients:
    """Clients of the endpoint, all streaming; they count what fails."""

    def __init__(self, cfg: Config, endpoint: str):
        self.cfg, self.endpoint = cfg, endpoint
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.lock = threading.Lock()

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def send(self, wanted: list[Prompt]) -> None:
        """These prompts, once each; returns when all are answered."""
        waiting = list(reversed(wanted))
        self._work(lambda: waiting.pop() if waiting else None).join_all()

    @contextmanager
    def streaming(self, mix: Mapping[str, int]) -> Iterator[None]:
        """As many prompts of each domain, in any order and again and again, as long as the block
        runs.
        """
        stopped, number = threading.Event(), iter(range(sys.maxsize))
        rng = random.Random(time.time_ns())
        mixed = [
            one
            for domain, count in mix.items()
            for one in prompts(domain, count, rng.randrange(10**6))
        ]
        rng.shuffle(mixed)
        running = self._work(lambda: None if stopped.is_set() else mixed[next(number) % len(mixed)])
        try:
            yield
        finally:
            stopped.set()
            running.join_all()

    def summary(self) -> dict[str, Any]:
        """How many requests went well and failed, and the drafters that answered."""
        return {"requests": dict(self.counts), "faults": self.faults[:5]}

    def _work(self, next_prompt: Callable[[], Prompt | None]) -> "_Workers":
        def worker() -> None:
            with httpx.Client(base_url=self.endpoint, timeout=300) as http:
                while True:
                    with self.lock:
                        prompt = next_prompt()
                    if prompt is None:
                        return
                    self._stream(http, prompt)

        return _Workers([threading.Thread(target=worker) for _ in range(self.cfg.demo.concurrency)])

    def _stream(self, http: httpx.Client, prompt: Prompt) -> None:
        body = {"model": SERVED_NAME, "messages": prompt.messages, "temperature": 0}
        body |= {"max_tokens": self.cfg.demo.max_tokens, "stream": True}
        headers = {"X-Flywheel-Conversation": prompt.conversation_id}
        headers["X-Flywheel-Domain"] = prompt.domain
        try:
            with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
                answer.raise_for_status()
                ended = "data: [DONE]" in list(answer.iter_lines())
                version = answer.headers["x-flywheel-drafter"].partition("/")[0]
            fault = "" if ended else "a stream ended early"
        except httpx.HTTPError as error:
            version, fault = "", repr(error)
        with self.lock:
            self.counts["failed" if fault else f"drafter {version}"] += 1
            if fault:
                self.faults.append(fault)


class _Workers:
    def __init__(self, threads: list[threading.Thread]):
        self.threads = threads
        for thread in threads:
            thread.start()

    def join_all(self) -> None:
        """Wait for all."""
        for thread in self.threads:
            thread.join()


def _random_drafter(cfg: Config, like: Path) -> Path:
    """A drafter of that shape that has learned nothing."""
    folder = cfg.path("bad", "random")
    save_drafter(new_drafter(read_config(like), seed=1), folder, torch.bfloat16)
    return folder


def force(cfg: Config, folder: Path) -> None:
    """Make a drafter champion without the gate, as somebody could by hand."""
    shape, identity = read_config(folder), target_id(cfg.target_path)
    fields = compat_fields(shape, identity)
    tags = {SHA256: drafter_sha256(folder), COMPAT: compat_key(shape, identity)}
    tags[FIELDS] = json.dumps(fields)
    with promoting(cfg) as moves:
        before = moves.registry.current(CHAMPION)
        version = moves.registry.register(folder, tags)
        moves.move("promote", before, version, "forced, without the gate", None)
    console.print(f"forced: version {version.number} is champion now")


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    console.rule(name)
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = round(time.perf_counter() - started, 1)


def _summary(done: dict[str, Any], seconds: dict[str, float]) -> dict[str, Any]:
    """What came of it; `ok` if the good drafter advanced, the bad one went back, nothing failed."""
    good, bad, asked = done["rollout"], done["bad"], done["clients"]["requests"]
    right = good["decision"] == "advanced" and bad["decision"] == "rolled back"
    return {
        "ok": right and not asked.get("failed"),
        "first": done["first"],
        "second": done["promote"]["version"],
        "good": good,
        "bad": bad,
        "clients": done["clients"],
        "tau": done["evaluate"]["tau"]["domains"],
        "tau_before": done["evaluate"]["baseline"]["tau"]["domains"],
        "seconds": seconds,
    }


def _show(summary: dict[str, Any]) -> None:
    rows = [
        [name, summary["tau_before"].get(name), value] for name, value in summary["tau"].items()
    ]
    print_table(
        f"Tau of drafter {summary['first']} and {summary['second']}, replayed",
        ["domain", "before", "after"],
        rows,
    )
    rows = [[name, summary[name]["decision"], summary[name]["why"]] for name in ("good", "bad")]
    print_table("Roll-outs", ["drafter", "decision", "why"], rows)
    console.print(f"requests: {summary['clients']['requests']}")


if __name__ == "__main__":
    run_as_module("demo-fleet")
