"""make bench-train: our training step against the trainer of speculators 0.9.0, on the same work.

Needs a finished demo (make demo) and `.venv-speculators`, which `make bench-train` creates. It
compares supervised block tokens per second and peak memory. Target, requests, anchors, block size,
layers, start weights and kind of optimizer are the same; docs/explanation/training-speed.md says
what still differs. Four processes take turns at every step:

    ours      the shipped step: softmax over seen and sampled tokens
    exact     ours with the full softmax, as they have it
    sdpa      theirs, as it runs without CUDA
    compiled  theirs, its forward forced through torch.compile
"""

import statistics
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from bench.harness import cpu_name, report
from bench.lines import Worker
from bench.trainers.task import batch_of, gamma_of, last_states, training_samples, write_task
from dflash.batches import Batch, Sample
from dflash.frozen_head import Candidates
from dflash.losses import decay
from dflash.model import new_drafter
from dflash.target_model import Target, backbone, load_target, resolve_dtype
from dflash.training_step import generator, step_loss
from jobs.base.config import Config, load
from jobs.base.console import print_table
from jobs.base.drafter_shape import drafter_config

THEIRS = Path(".venv-speculators/bin/python")
ROUNDS = 9
SAMPLES = 40
LOSS_TOLERANCE = 1e-3  # relative; both sum about 800 float32 terms, in different orders

Answers = dict[str, list[dict[str, Any]]]


def main() -> None:
    """Compare and print the JSON line: `ratio` is to sdpa, detail.ratio_compiled to compiled."""
    cfg = load(None, [*sys.argv[1:], "drafter.draft_vocab=0"])  # as in speculators
    samples = training_samples(cfg)
    seen = torch.cat([s.ids[s.loss_mask] for s in samples]).unique()
    samples = samples[:SAMPLES]
    target = load_target(cfg.target_path, resolve_dtype(cfg.target.dtype))
    states = last_states(target, samples)
    with TemporaryDirectory() as temp, ExitStack() as stack:
        folder = Path(temp)
        write_task(folder, cfg, samples, seen, states, ROUNDS + 1)
        workers = [
            stack.enter_context(Worker(name, command, folder / f"{name}.log"))
            for name, command in commands(cfg, folder, len(target.head)).items()
        ]
        answers = take_turns(workers, ROUNDS)
        ready = {worker.name: worker.ready for worker in workers}
    theirs = [answers[name][0]["loss"] for name in ("sdpa", "compiled")]
    same = check_loss(cfg, target, samples, states, theirs)
    show(answers)
    report("train", ratios(answers, "ours", "sdpa"), UNIT, detail(cfg, answers, ready) | same)


UNIT = "supervised block tokens/s ours / theirs"


def commands(cfg: Config, folder: Path, vocab_size: int) -> dict[str, list[str | Path]]:
    """The command that starts each side."""
    if not THEIRS.is_file():
        raise ValueError(f"{THEIRS} is missing: run `make bench-train`, which sets it up")
    ours: list[str | Path] = [sys.executable, "-m", "bench.trainers.ours", folder]
    theirs: list[str | Path] = [THEIRS, "-m", "bench.trainers.theirs", folder]
    loss = ["--loss-fn", "ce", "--per-position-loss-weight", "fixed-exp-decay"]
    loss += ["--dflash-decay-gamma", str(gamma_of(cfg))]
    return {
        "ours": [*ours, str(cfg.train.random_candidates)],
        "exact": [*ours, str(vocab_size)],
        "sdpa": [*theirs, "sdpa", *loss],
        "compiled": [*theirs, "compiled", *loss],
    }


def take_turns(workers: list[Worker], rounds: int) -> Answers:
    """Let every worker take every step, in rotating order. Step 0 is a warm-up (torch.compile)."""
    answers: Answers = {worker.name: [] for worker in workers}
    for step in tqdm(range(rounds + 1), desc="steps", unit="round"):
        first = step % len(workers)
        for worker in workers[first:] + workers[:first]:
            answers[worker.name].append(worker.ask("step", step))
        slots = {name: given[step]["slots"] for name, given in answers.items()}
        assert len(set(slots.values())) == 1, f"unequal supervised tokens: {slots}"
    return answers


def check_loss(
    cfg: Config, target: Target, samples: list[Sample], states: list[Tensor], theirs: list[float]
) -> dict[str, Any]:
    """Check that both sides compute the same loss, in step 0, with their labels (the target's
    argmax) in our step. Raises ValueError if the losses differ.

    They divide by the number of supervised slots, we by the sum of the slots' weights.
    """
    drafter = new_drafter(drafter_config(cfg), cfg.train.seed)
    batch = batch_of(cfg, samples, drafter.cfg.num_drafts, 0)
    pairs = zip(samples, states, strict=True)
    teacher = [replace(s, ids=argmax_ids(target, s, last)) for s, last in pairs]
    other = batch_of(cfg, teacher, drafter.cfg.num_drafts, 0)
    taught = replace(batch, labels_BNKE=other.labels_BNKE)
    borrowed, weigh = (target.embedding, target.head), partial(decay, gamma=gamma_of(cfg))
    out = step_loss(drafter, taught, *borrowed, exact(target, taught), generator(0), weigh)
    ours = float(out.loss.detach()) / int(out.slots_K.sum())
    if max(abs(ours - loss) for loss in theirs) > LOSS_TOLERANCE * ours:
        raise ValueError(f"the two sides compute different losses: ours {ours}, theirs {theirs}")
    real = batch.supervised_BNK > 0
    agree = (batch.labels_BNKE == taught.labels_BNKE)[real].float().mean()
    return {"loss_same_labels": {"ours": ours, "theirs": theirs}, "labels_equal": float(agree)}


def argmax_ids(target: Target, sample: Sample, last: Tensor) -> Tensor:
    """The sample's ids, each replaced by the target's argmax at the position before."""
    with torch.inference_mode():
        normed = backbone(target.model).norm(last.to(target.dtype))
        return torch.cat([sample.ids[:1], target.logits(normed)[:-1].argmax(-1)])


def exact(target: Target, batch: Batch) -> Candidates:
    """The full softmax."""
    return Candidates(batch.labels_BNKE.unique(), len(target.head), len(target.head))


def ratios(answers: Answers, ours: str, theirs: str) -> list[float]:
    """Their seconds / our seconds, step by step: both supervise the same tokens."""
    pairs = zip(answers[ours][1:], answers[theirs][1:], strict=True)
    return [b["seconds"] / a["seconds"] for a, b in pairs]


def summary(found: list[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(found), "low": min(found), "high": max(found)}


def detail(cfg: Config, answers: Answers, ready: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Everything else of the JSON line."""
    shape = drafter_config(cfg)
    measured = {name: given[1:] for name, given in answers.items()}
    peak = {name: given[-1]["peak"] for name, given in measured.items()}
    return {
        "ratio_compiled": summary(ratios(answers, "ours", "compiled")),
        "ratio_exact_softmax": summary(ratios(answers, "exact", "sdpa")),
        "ratio_exact_softmax_compiled": summary(ratios(answers, "exact", "compiled")),
        "tokens_per_second": {
            name: statistics.median(a["slots"] / a["seconds"] for a in given)
            for name, given in measured.items()
        },
        "supervised_tokens": statistics.median(a["slots"] for a in measured["ours"]),
        "peak_bytes": peak,
        "peak_bytes_above_loaded": {name: peak[name] - ready[name]["resident"] for name in peak},
        "seconds_split": {name: split(given) for name, given in measured.items()},
        "dtype": str(resolve_dtype(cfg.target.dtype)),
        "requests": cfg.train.batch_size,
        "anchors": cfg.train.anchors,
        "block_size": shape.block_size,
        "layers": shape.num_hidden_layers,
        "optimizer": cfg.train.optimizer,
        "compiled_for": ready["compiled"]["vector_isa"],
        "threads": torch.get_num_threads(),
        "cpu": cpu_name(),
        "versions": {"torch": version("torch"), "speculators": "0.9.0"},
    }


def split(given: list[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of every part of a step."""
    parts = given[0]["split"]
    return {part: statistics.median(a["split"][part] for a in given) for part in parts}


def show(answers: Answers) -> None:
    """Print the tables."""
    rows = []
    for name, given in answers.items():
        steps = given[1:]
        seconds = statistics.median(a["seconds"] for a in steps)
        rate = statistics.median(a["slots"] / a["seconds"] for a in steps)
        rows.append([name, seconds, rate, steps[-1]["peak"] / 2**30])
    print_table("A training step", ["side", "s", "supervised tokens/s", "peak GiB"], rows)
    parts = split(answers["ours"][1:])
    total = statistics.median(a["seconds"] for a in answers["ours"][1:])
    shares = [[part, seconds, seconds / total] for part, seconds in parts.items()]
    print_table("Our step", ["part", "s", "share"], shares)


if __name__ == "__main__":
    main()
