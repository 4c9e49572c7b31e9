"""The other side of bench/train.py: the trainer of `speculators` 0.9.0, run by its own command.

python -m bench.trainers.theirs FOLDER sdpa|compiled [flags of `speculators train`], in the
environment of bench/trainers/requirements.txt. Everything from the flags to the optimizer step is
theirs; what is replaced, and why:

- local rank, device type, accelerator synchronisation: its command needs an accelerator,
- the loader: it gives out a collated batch of the task when the parent asks for a step,
- the choice of anchors: they are those of our step,
- the start weights: ours,
- in float32 runs, the dtype of torch.optim.Muon's iteration: it is bfloat16, which a CPU that
  computes in float32 emulates, and their step would be slow for that reason.
"""
# pyright: reportMissingImports=false

import inspect
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.models.dflash import core
from speculators.train import cli, trainer
from speculators.train.config import TrainConfig
from speculators.train.data import CollateFn
from torch import Tensor
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch.optim import _muon

from bench.lines import Lines


class Loader:
    """Their train loader. A step lasts from giving out its batch until the next is asked for."""

    batch_sampler = None

    def __init__(self, lines: Lines, folder: Path, task: dict[str, Any]):
        self.lines, self.task = lines, task
        self.tensors = load_file(folder / "samples.safetensors")
        self.start = load_file(folder / "start" / "model.safetensors")
        shape = task["drafter"]
        self.collate = CollateFn(
            task["row"],
            shape["hidden_size"],
            len(shape["target_layer_ids"]),
            getattr(torch, task["dtype"]),
        )
        self.facts: dict[str, Any] = {}
        self.model: Any = None
        self.anchors = torch.zeros(0, dtype=torch.int64)
        self.metrics: dict[str, Any] = {}
        self.profile: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self.task["plan"])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.lines.answer(**self.facts)
        for command, argument in self.lines:
            if command == "save":
                state = self.model.state_dict()
                save_file({name: state[name].contiguous() for name in self.start}, argument)
                self.lines.answer()
                continue
            batch = self.batch(self.task["plan"][argument])
            started = time.perf_counter()
            yield batch
            seconds = time.perf_counter() - started
            self.lines.answer(
                seconds=seconds,
                slots=int(self.metrics["full_acc_total"]),
                loss=float(self.metrics["loss_sum"]),
                split={part: self.profile[f"{part}_ms"] / 1000 for part in ("fwd", "bwd", "opt")},
            )

    def batch(self, picks: list[tuple[int, list[int]]]) -> dict[str, Any]:
        """One packed row, collated by their code; keeps the positions of its anchors."""
        samples, anchors, offset = [], [], 0
        for i, chosen in picks:
            ids = self.tensors[f"ids.{i}"]
            samples.append(
                {
                    "hidden_states": self.tensors[f"features.{i}"],
                    "input_ids": ids,
                    "verifier_last_hidden_states": self.tensors[f"last.{i}"],
                    "loss_mask": self.tensors[f"loss_mask.{i}"].long(),
                    "lengths": torch.tensor([len(ids)]),
                    "position_ids": torch.arange(len(ids)),
                }
            )
            anchors += [offset + a for a in chosen]
            offset += len(ids)
        self.anchors = torch.tensor(anchors)
        return self.collate(samples)

    def select_anchors(
        self, loss_mask: Tensor, num_anchors: int, block_size: int
    ) -> tuple[Tensor, Tensor]:
        """Replaces their function: (positions int64, valid bool), each [num_anchors]."""
        positions = torch.zeros(num_anchors, dtype=torch.int64)
        positions[: len(self.anchors)] = self.anchors
        return positions, torch.arange(num_anchors) < len(self.anchors)


def main() -> None:
    """Put the replacements in place and run `speculators train`."""
    lines = Lines()
    folder, how, *flags = sys.argv[1:]
    task = json.loads((Path(folder) / "task.json").read_text())
    loader = Loader(lines, Path(folder), task)
    run_on_cpu(loader)
    if task["dtype"] == "float32":
        float32_muon()
    if how == "compiled":  # what their decorator does where CUDA is available
        core.DFlashDraftModel.forward = torch.compile(core.DFlashDraftModel.forward)
        loader.facts["vector_isa"] = str(pick_vec_isa())
    with tempfile.TemporaryDirectory() as scratch:
        cli.main(TrainConfig.resolve([*base_flags(task, scratch), *flags]))


def base_flags(task: dict[str, Any], scratch: str) -> list[str]:
    """The same target, taps, shape, row and dtype as our step."""
    shape, train = task["drafter"], task["train"]
    layers = range(shape["num_hidden_layers"])
    flags = {
        "speculator-type": "dflash",
        "verifier-name-or-path": task["target"],
        "num-layers": len(layers),
        "block-size": shape["block_size"],
        "mask-token-id": shape["mask_token_id"],
        "draft-attn-impl": "sdpa",
        "loss-implementation": "eager",
        "hidden-states-dtype": task["dtype"],
        "total-seq-len": task["row"],
        "max-anchors": train["batch_size"] * train["anchors"],
        "optimizer": train["optimizer"],
        "epochs": 1,
        "scheduler-total-steps": len(task["plan"]),
        "data-path": scratch,
        "save-path": scratch,
        "log-dir": scratch,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    taps = [str(tap + 1) for tap in shape["target_layer_ids"]]  # their ids count the embedding
    full = [str(layer) for layer in layers]
    # --save-best without a val loader: no checkpoint is written.
    return [*words, "--target-layer-ids", *taps, "--full-attention-indices", *full, "--save-best"]


def run_on_cpu(loader: Loader) -> None:
    """Make their trainer run on a CPU, with batches from `loader`."""

    class Trainer(trainer.Trainer):
        def setup_trainer(self) -> None:
            super().setup_trainer()
            self.device_type = "cpu"

        def setup_model(self) -> None:
            super().setup_model()
            keys = self.model.load_state_dict(loader.start, strict=False)
            assert not keys.unexpected_keys, keys.unexpected_keys
            loader.model = self.model

    class Timer(trainer._StepTimer):
        def profile(self, num_tokens: int) -> dict | None:
            loader.profile = super().profile(num_tokens) or {}
            return loader.profile

    def keep_sums(metrics: dict[str, float], world_size: int = 1) -> dict[str, float]:
        loader.metrics = dict(metrics)
        return normalize(metrics, world_size)

    normalize, trainer.normalize_counted_metrics = trainer.normalize_counted_metrics, keep_sums
    trainer._StepTimer = Timer
    trainer.get_local_rank = lambda: "cpu"
    trainer.tqdm = lambda batches, **_: batches
    torch.accelerator.synchronize = lambda *_: None
    core.select_anchors = loader.select_anchors
    cli.create_train_val_loaders = lambda **_: (loader, None)
    cli.Trainer = Trainer


def float32_muon() -> None:
    """Make torch.optim.Muon iterate in float32."""
    source = inspect.getsource(_muon._zeropower_via_newtonschulz)
    assert source.count("grad.bfloat16()") == 1
    exec(source.replace("grad.bfloat16()", "grad.float()"), _muon.__dict__)


if __name__ == "__main__":
    main()
