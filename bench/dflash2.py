"""make bench-dflash2 [ARGS="work=runs/mine"]: DFlash 2 against DFlash after equal training time.

Needs a finished demo (make demo): its target, training samples, features and held-out requests. For
each of SEEDS seeds, three drafters learn from the same samples and start from the same body:

    dflash        train.steps steps
    dflash2       as many steps as take the same seconds
    same_steps    dflash2, train.steps steps

The one that has used the smallest share of its steps takes the next one, so all train under the
same load. `ratio` is tau of dflash2 over tau of dflash, replayed on the test split. `detail` has
both taus with intervals, the gain, what a round of drafting costs, and the speed-up that follows:
tokens of a round over the seconds of a round, drafting and verification together.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from bench.harness import cpu_name, report, seconds
from bench.trainers.task import training_samples
from dflash.acceptance import tau
from dflash.batches import Sample
from dflash.decode import choose_drafts
from dflash.drafter_config import PUBLISHED_HEAD, DrafterConfig
from dflash.frozen_head import Candidates
from dflash.losses import choose_weights, default_gamma, recorded_token
from dflash.model import Drafter, new_drafter
from dflash.optim import build_optimizers, lr_scale
from dflash.replay import Replayable, draft_hidden, replay
from dflash.sampling import GREEDY
from dflash.target_model import Target, load_target, resolve_dtype
from dflash.training_step import generator, step_batch, step_indices, step_loss
from jobs.base.config import Config, load
from jobs.base.console import print_table
from jobs.base.drafter_shape import drafter_config
from jobs.base.sections.training import Train
from jobs.dataset.samples import load_requests
from jobs.evaluation.intervals import Resamples

SEEDS = 2
PROBE_STEPS = 6
TIMED = 15
"""Rounds that are timed for each drafter."""


@dataclass(frozen=True)
class Task:
    """What all drafters have in common. conversations: one for each of `requests`."""

    target: Target
    samples: Sequence[Sample]
    requests: Sequence[Replayable]
    conversations: Sequence[str]
    train: Train
    shape: DrafterConfig


class Learner:
    """A drafter in training, as the step of jobs/training/loop.py on one rank."""

    def __init__(self, task: Task, second: bool, seed: int, steps: int):
        shape = replace(task.shape, **PUBLISHED_HEAD) if second else task.shape
        cfg, self.task, self.seed, self.steps = task.train, task, seed, steps
        self.drafter, self.step, self.seconds = new_drafter(shape, seed), 0, 0.0
        self.optimizers = build_optimizers(self.drafter, cfg.optimizer, cfg.lr, task.target.dtype)
        seen = torch.cat([s.ids[s.loss_mask] for s in task.samples]).unique()
        self.candidates = Candidates(seen, len(task.target.head), cfg.random_candidates)
        gamma = cfg.gamma or default_gamma(shape.block_size)
        self.weigh = choose_weights(cfg.weights, gamma)
        self.weigh_selector = choose_weights(cfg.selector_weights, gamma)

    def advance(self) -> None:
        """Take one step."""
        self.seconds += seconds(self._step)
        self.step += 1

    def _step(self) -> None:
        cfg, task, step = self.task.train, self.task, self.step
        picks = step_indices(step, len(task.samples), cfg.batch_size, self.seed)
        k = self.drafter.cfg.num_drafts
        batch = step_batch(task.samples, picks, cfg.anchors, k, recorded_token, self.seed)
        borrowed = (task.target.embedding, task.target.head)
        draw, weights = generator("c", self.seed, step), (self.weigh, cfg.tv, self.weigh_selector)
        out = step_loss(self.drafter, batch, *borrowed, self.candidates, draw, *weights)
        (out.loss / out.weight).backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), cfg.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * lr_scale(step, self.steps, cfg.warmup)
            optimizer.step()
            optimizer.zero_grad()

    def finished(self) -> Drafter:
        """The drafter in the target's dtype."""
        return self.drafter.to(self.task.target.dtype)


def main() -> None:
    """Train, replay, time, and print the JSON line."""
    cfg = load(None, [*sys.argv[1:], "drafter.draft_vocab=0"])  # as DFlash 2 has it
    task = task_of(cfg)
    results = [race(task, seed, cfg.train.steps) for seed in range(SEEDS)]
    rows = [[r["seed"], name, *r[name].values()] for r in results for name in NAMES]
    print_table("DFlash and DFlash 2", ["seed", "drafter", "steps", "s", "tau"], rows)
    shown = {
        "seeds": results,
        "ratio_same_steps": statistics.median(r["ratio_same_steps"] for r in results),
        "speed_up": statistics.median(r["speed_up"] for r in results),
        "train": {"batch_size": cfg.train.batch_size, "anchors": cfg.train.anchors},
        "samples": len(task.samples),
        "requests": len(task.requests),
        "dtype": str(task.target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "cpu": cpu_name(),
    }
    unit = "tau of DFlash 2 / tau of DFlash at equal seconds of training"
    report("dflash2", [r["ratio"] for r in results], unit, shown)


def task_of(cfg: Config) -> Task:
    """The demo's samples and held-out requests. Raises ValueError if there is no finished demo."""
    rows, requests = load_requests(cfg, "test")
    if not requests:
        raise ValueError(f"{cfg.work} has no test request to replay: ingest more conversations")
    return Task(
        target=load_target(cfg.target_path, resolve_dtype(cfg.target.dtype)),
        samples=training_samples(cfg),
        requests=requests,
        conversations=[row["conversation_id"] for row in rows],
        train=cfg.train,
        shape=drafter_config(cfg),
    )


NAMES = ("dflash", "dflash2", "same_steps")


def race(task: Task, seed: int, steps: int) -> dict[str, Any]:
    """Train the three drafters of a seed, and compare them."""
    plain, second = probe(task, seed)
    counts = {
        "dflash": steps,
        "dflash2": max(1, round(steps * plain / second)),
        "same_steps": steps,
    }
    racers = {n: Learner(task, n != "dflash", seed, count) for n, count in counts.items()}
    with tqdm(total=sum(counts.values()), desc=f"seed {seed}", unit="step") as bar:
        while running := [r for r in racers.values() if r.step < r.steps]:
            min(running, key=lambda r: r.step / r.steps).advance()
            bar.update()
    drafters = {name: racer.finished() for name, racer in racers.items()}
    k, borrowed = task.shape.num_drafts, (task.target.embedding, task.target.head)
    walks = {n: replay(d, *borrowed, task.requests, k) for n, d in drafters.items()}
    taus = {name: tau(found) for name, found in walks.items()}
    draws = Resamples(task.conversations, 2000)
    gain = draws.tau_gain(walks["dflash2"], walks["dflash"], k)
    costs = {name: round_seconds(task, drafters[name]) for name in ("dflash", "dflash2")}
    speed = {n: taus[n] / sum(costs[n][part] for part in ("draft", "verify")) for n in costs}
    return {
        "seed": seed,
        **{
            n: {"steps": racers[n].step, "seconds": racers[n].seconds, "tau": taus[n]}
            for n in NAMES
        },
        "ratio": taus["dflash2"] / taus["dflash"],
        "ratio_same_steps": taus["same_steps"] / taus["dflash"],
        "tau_ci": {n: draws.tau(found, k).interval for n, found in walks.items()},
        "gain": gain.value,
        "gain_ci": gain.interval,
        "round_seconds": costs,
        "speed_up": speed["dflash2"] / speed["dflash"],
    }


def probe(task: Task, seed: int) -> tuple[float, float]:
    """Median seconds of a step without the head and with it, in turns; the first is a warm-up."""
    both = [Learner(task, second, seed, PROBE_STEPS) for second in (False, True)]
    spent: list[list[float]] = [[], []]
    for _ in range(PROBE_STEPS):
        for racer, known in zip(both, spent, strict=True):
            before = racer.seconds
            racer.advance()
            known.append(racer.seconds - before)
    plain, second = (statistics.median(known[1:]) for known in spent)
    return plain, second


@torch.inference_mode()
def round_seconds(task: Task, drafter: Drafter) -> dict[str, float]:
    """Median seconds of the parts of a round of one request, in the middle of its answer: the
    drafter's forward, all of drafting, and the target's verification of the drafts.
    """
    target, k = task.target, drafter.cfg.num_drafts
    request = max(task.requests, key=lambda r: r.num_output)
    at = request.num_prompt + request.num_output // 2
    context = drafter.context(request.features[None, :at].to(target.embedding))
    tokens, anchor = request.ids[at].view(1, 1), torch.tensor([[at]])
    borrowed = (target.embedding, context, tokens, anchor, k)
    forward, draft, verify = [], [], []
    for _ in range(TIMED):
        started = time.perf_counter()
        hidden = draft_hidden(drafter, *borrowed)[0, 0]
        forward.append(time.perf_counter() - started)
        choose_drafts(drafter, hidden, target.head, int(tokens), GREEDY, generator("none"))
        draft.append(time.perf_counter() - started)
        verify.append(seconds(lambda: _verify(target, request.ids[: k + 1].tolist())))
    parts = {"forward": forward, "draft": draft, "verify": verify}
    return {name: statistics.median(times) for name, times in parts.items()}


def _verify(target: Target, ids: list[int]) -> None:
    target.logits(target.features([ids], (0,))[0].last)


if __name__ == "__main__":
    main()
