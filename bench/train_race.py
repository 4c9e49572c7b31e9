"""make bench-train-race: seconds of training until replay reaches a tau, ours against speculators.

All sides have the same data, target, drafter shape and start weights, and take the configured
number of requests and anchors per step. The side that has trained for the fewest seconds takes the
next step, so that all run under the same load. Replays on the val split are not counted. Each side
has its own learning-rate schedule: ours lasts RACE_STEPS steps, theirs BUDGET times the seconds of
those:

    ours       the settings of this repository, with train.weights=decay as in bench-train
    published  the defaults of `speculators train` for DFlash: cross-entropy, D-PACE, Muon at 1e-3
               with decay 0.1 and its RMS matching, linear schedule
    our_lr     as published, but with our learning rates: no decay, no RMS matching
"""

import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file

from bench.harness import cpu_name, report
from bench.lines import Worker
from bench.train import commands, take_turns
from bench.trainers.task import last_states, training_samples, write_task
from dflash.acceptance import tau
from dflash.model import Drafter, new_drafter
from dflash.optim import build_optimizers
from dflash.replay import Replayable, replay
from dflash.target_model import Target, load_target, resolve_dtype
from dflash.training_step import mixed_precision
from jobs.base.config import Config, load
from jobs.base.console import console, print_table
from jobs.base.drafter_shape import drafter_config
from jobs.dataset.samples import load_requests

GOAL = 2.0
RACE_STEPS = 90
BUDGET = 2.5
LOOK_EVERY = 10.0
"""Seconds of training between two replays."""
PROBE_STEPS = 3


@dataclass
class Racer:
    """One side: its worker, its training time, and its tau over time."""

    worker: Worker
    steps: int
    step: int = 0
    seconds: float = 0.0
    next_look: float = LOOK_EVERY
    curve: list[tuple[float, int, float]] = field(default_factory=list)
    """(seconds, steps, tau)."""

    @property
    def reached(self) -> bool:
        """Whether its last tau was at least GOAL."""
        return bool(self.curve) and self.curve[-1][2] >= GOAL

    @property
    def running(self) -> bool:
        """Whether it may take another step."""
        return not self.reached and self.step < self.steps

    def advance(self) -> bool:
        """One step; True if it is time to look at tau."""
        self.seconds += self.worker.ask("step", self.step)["seconds"]
        self.step += 1
        due = self.seconds >= self.next_look or self.step == self.steps
        if due:
            self.next_look = self.seconds + LOOK_EVERY
        return due


def main() -> None:
    """Race and print the JSON line; `ratio` is seconds of published / ours."""
    cfg = load(None, [*sys.argv[1:], "drafter.draft_vocab=0"])  # as in speculators
    cfg = cfg.override("train", steps=RACE_STEPS)
    samples = training_samples(cfg)
    seen = torch.cat([s.ids[s.loss_mask] for s in samples]).unique()
    target = load_target(cfg.target_path, resolve_dtype(cfg.target.dtype))
    val = load_requests(cfg, "val")[1][: cfg.train.val_samples]
    if not val:
        raise ValueError(f"{cfg.work} has no val request to replay: ingest more conversations")
    states = last_states(target, samples)
    with TemporaryDirectory() as temp:
        folder = Path(temp)
        write_task(folder, cfg, samples, seen, states, int(BUDGET * RACE_STEPS))
        steps = theirs_steps(cfg, folder, len(target.head))
        with ExitStack() as stack:
            racers = {
                name: Racer(
                    stack.enter_context(Worker(name, command, folder / f"{name}.log")),
                    RACE_STEPS if name == "ours" else steps,
                )
                for name, command in lineup(cfg, folder, len(target.head), steps).items()
            }
            run(
                racers,
                target,
                new_drafter(drafter_config(cfg), cfg.train.seed),
                val,
                folder / "weights.safetensors",
            )
    finish(cfg, racers)


def lineup(cfg: Config, folder: Path, vocab_size: int, steps: int) -> dict[str, list]:
    """The command that starts each side."""
    ours = commands(cfg, folder, vocab_size)
    theirs = ours["sdpa"][: ours["sdpa"].index("sdpa") + 1]
    theirs = [*theirs, "--scheduler-total-steps", str(steps)]
    dtype = resolve_dtype(cfg.target.dtype)
    optimizers = build_optimizers(
        new_drafter(drafter_config(cfg), cfg.train.seed), "muon", cfg.train.lr, dtype
    )
    matrices, vectors = (str(optimizer.param_groups[0]["lr"]) for optimizer in optimizers)
    muon = ["--muon-lr", matrices, "--muon-weight-decay", "0", "--weight-decay", "0"]
    muon += ["--lr", vectors, "--muon-adjust-lr-fn", "original"]
    return {"ours": ours["ours"], "published": theirs, "our_lr": [*theirs, *muon]}


def theirs_steps(cfg: Config, folder: Path, vocab_size: int) -> int:
    """How many of their steps take BUDGET times as long as RACE_STEPS of ours, at most BUDGET times
    as many.
    """
    names = ("ours", "published")
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(name, command, folder / f"{name}-probe.log"))
            for name, command in lineup(cfg, folder, vocab_size, PROBE_STEPS).items()
            if name in names
        ]
        answers = take_turns(workers, PROBE_STEPS - 1)
    ours, theirs = (statistics.median(a["seconds"] for a in answers[n][1:]) for n in names)
    return int(BUDGET * RACE_STEPS * min(1.0, ours / theirs))


def run(
    racers: dict[str, Racer],
    target: Target,
    drafter: Drafter,
    val: Sequence[Replayable],
    weights: Path,
) -> None:
    """Race until every side has reached the goal or the end of its schedule."""
    names = {id(racer): name for name, racer in racers.items()}
    while running := [racer for racer in racers.values() if racer.running]:
        racer = min(running, key=lambda r: r.seconds)
        if not racer.advance():
            continue
        racer.worker.ask("save", str(weights))
        drafter.load_state_dict(load_file(weights))
        borrowed = (target.embedding, target.head)
        with mixed_precision(target.dtype):
            value = tau(replay(drafter, *borrowed, val, drafter.cfg.num_drafts))
        racer.curve.append((racer.seconds, racer.step, value))
        name = names[id(racer)]
        console.print(f"{name:9} {racer.seconds:6.1f} s {racer.step:4} steps  tau {value:.3f}")


def finish(cfg: Config, racers: dict[str, Racer]) -> None:
    """Print the table and the JSON line. Raises ValueError if ours did not reach the goal."""
    ours = racers["ours"]
    if not ours.reached:
        raise ValueError(f"ours did not reach tau {GOAL} in {RACE_STEPS} steps: {ours.curve}")
    rows = [[name, r.seconds, r.step, r.curve[-1][2], r.reached] for name, r in racers.items()]
    print_table(f"Until tau {GOAL}", ["side", "s", "steps", "tau", "reached"], rows)
    theirs = racers["published"]
    least = "" if theirs.reached else ", at least: theirs did not reach it"
    detail: dict[str, Any] = {
        "goal_tau": GOAL,
        "reached": {name: racer.reached for name, racer in racers.items()},
        "ratio_our_lr": racers["our_lr"].seconds / ours.seconds,
        "curves": {name: racer.curve for name, racer in racers.items()},
        "schedule_steps": {name: racer.steps for name, racer in racers.items()},
        "train": {"batch_size": cfg.train.batch_size, "anchors": cfg.train.anchors},
        "dtype": str(resolve_dtype(cfg.target.dtype)),
        "threads": torch.get_num_threads(),
        "cpu": cpu_name(),
    }
    ratio = theirs.seconds / ours.seconds
    report("train-race", [ratio], f"s of training to tau {GOAL} theirs / ours{least}", detail)


if __name__ == "__main__":
    main()
