"""Our side of bench/train.py: the training step of jobs/train.py on one rank, without Ray.

python -m bench.trainers.ours FOLDER RANDOM_CANDIDATES; commands come in lines (bench/lines.py).
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.lines import Lines
from dflash.batches import Batch, Sample
from dflash.checkpoint import load_drafter
from dflash.frozen_head import Candidates
from dflash.losses import decay, recorded_token
from dflash.optim import build_optimizers, lr_scale
from dflash.target_model import load_borrowed
from dflash.training_step import StepLoss, generator, step_batch, step_indices, step_loss


class Trainer:
    """Weights, optimizers, samples, and how many seconds each part of a step took."""

    def __init__(self, folder: Path, random_candidates: int):
        task = json.loads((folder / "task.json").read_text())
        self.cfg: dict[str, Any] = task["train"]
        dtype = getattr(torch, task["dtype"])
        self.embedding, self.head = load_borrowed(task["target"], dtype)
        tensors = load_file(folder / "samples.safetensors")
        self.samples = [
            Sample(*name, *(tensors[f"{part}.{i}"] for part in ("ids", "loss_mask", "features")))
            for i, name in enumerate(task["names"])
        ]
        self.candidates = Candidates(tensors["seen"], len(self.head), random_candidates)
        self.drafter = load_drafter(folder / "start")
        self.optimizers = build_optimizers(
            self.drafter, self.cfg["optimizer"], self.cfg["lr"], dtype
        )
        self.spent: dict[str, float] = defaultdict(float)
        self.drafter.context = self.timed("context", self.drafter.context)
        self.drafter.forward = self.timed("blocks", self.drafter.forward)

    def timed(self, name: str, work: Callable) -> Callable:
        """`work`, adding its seconds to `spent[name]`."""

        def run(*args: Any) -> Any:
            started = time.perf_counter()
            out = work(*args)
            self.spent[name] += time.perf_counter() - started
            return out

        return run

    def step(self, index: int) -> dict[str, Any]:
        """Take one optimizer step; returns its loss, supervised slots, seconds, and their split.

        In the split, `loss` is the part of step_loss outside the drafter: candidates, logits,
        cross-entropy, and the gradient through the frozen head, which is computed in the forward.
        """
        self.spent.clear()
        started = time.perf_counter()
        batch = self.timed("batch", self.batch)(index)
        out: StepLoss = self.timed("loss", self.loss)(batch, index)
        self.timed("backward", (out.loss / out.weight).backward)()
        self.timed("optimizer", self.update)(index)
        seconds = time.perf_counter() - started
        self.spent["loss"] -= self.spent["context"] + self.spent["blocks"]
        loss = float(out.loss.detach() / out.weight)
        slots = int(out.slots_K.sum())
        return {"seconds": seconds, "slots": slots, "loss": loss, "split": dict(self.spent)}

    def batch(self, index: int) -> Batch:
        """The batch of this step."""
        cfg = self.cfg
        picks = step_indices(index, len(self.samples), cfg["batch_size"], cfg["seed"])
        num_drafts = self.drafter.cfg.num_drafts
        return step_batch(
            self.samples, picks, cfg["anchors"], num_drafts, recorded_token, cfg["seed"]
        )

    def loss(self, batch: Batch, index: int) -> StepLoss:
        """The forward pass and the loss."""
        draw = generator("candidates", self.cfg["seed"], index)
        borrowed, weigh = (self.embedding, self.head), partial(decay, gamma=self.cfg["gamma"])
        return step_loss(self.drafter, batch, *borrowed, self.candidates, draw, weigh)

    def update(self, index: int) -> None:
        """Clip the gradients, set the learning rate, and step."""
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.cfg["clip"])
        scale = lr_scale(index, self.cfg["steps"], self.cfg["warmup"])
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * scale
            optimizer.step()
            optimizer.zero_grad()

    def save(self, path: str) -> dict[str, Any]:
        """Write the weights."""
        save_file({name: t.detach() for name, t in self.drafter.state_dict().items()}, path)
        return {}


def main() -> None:
    """Load everything, answer that it is ready, then execute commands."""
    lines = Lines()
    trainer = Trainer(Path(sys.argv[1]), int(sys.argv[2]))
    lines.answer()
    for command, argument in lines:
        lines.answer(**getattr(trainer, command)(argument))


if __name__ == "__main__":
    main()
