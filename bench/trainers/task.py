"""Write what both trainers read: a folder with samples, start weights and every step's anchors."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from dflash.batches import Batch, Sample
from dflash.checkpoint import save_drafter
from dflash.losses import default_gamma, recorded_token
from dflash.model import new_drafter
from dflash.target_model import Target, resolve_dtype
from dflash.training_step import draw_anchors, step_batch, step_indices
from jobs.base.config import Config
from jobs.base.drafter_shape import drafter_config
from jobs.training.feed import LazySamples, training_features, training_set
from jobs.training.runs import live_pin

TARGET_BATCH = 16


def training_samples(cfg: Config) -> list[Sample]:
    """The demo's training samples. Raises ValueError if there is no finished demo."""
    if not (cfg.target_path / "config.json").is_file():
        raise ValueError(f"{cfg.work} has no target: run `make demo` first, or pass work=FOLDER")
    data = training_set(cfg, live_pin(cfg), drafter_config(cfg).num_drafts)
    features = training_features(cfg.override("train", cache_gib=float("inf")), data)
    return list(LazySamples(data.samples, features))


def last_states(target: Target, samples: Sequence[Sample]) -> list[Tensor]:
    """The target's last hidden states before its final norm, [T, H] bfloat16 per sample.

    The other trainer needs them in addition to the features: it computes its labels from them.
    """
    found = []
    for start in tqdm(range(0, len(samples), TARGET_BATCH), desc="last states", unit="batch"):
        ids = [s.ids.tolist() for s in samples[start : start + TARGET_BATCH]]
        states = target.features(ids, (target.num_layers - 1,))
        found += [s.taps.to(torch.bfloat16) for s in states]
    return found


def batch_of(cfg: Config, samples: Sequence[Sample], num_drafts: int, step: int) -> Batch:
    """The batch that training takes at `step`."""
    train = cfg.train
    picks = step_indices(step, len(samples), train.batch_size, train.seed)
    return step_batch(samples, picks, train.anchors, num_drafts, recorded_token, train.seed)


def gamma_of(cfg: Config) -> float:
    """train.gamma, the decay of the slots' weights, or its default."""
    return cfg.train.gamma or default_gamma(drafter_config(cfg).block_size)


def write_task(
    folder: Path,
    cfg: Config,
    samples: Sequence[Sample],
    seen: Tensor,
    states: Sequence[Tensor],
    steps: int,
) -> None:
    """Write the folder. `seen`: all label ids of the training split, for Candidates."""
    drafter = new_drafter(drafter_config(cfg), cfg.train.seed)
    save_drafter(drafter, folder / "start", torch.float32)
    tensors = {"seen": seen}
    for i, (sample, last) in enumerate(zip(samples, states, strict=True)):
        tensors |= {f"ids.{i}": sample.ids, f"loss_mask.{i}": sample.loss_mask}
        tensors |= {f"features.{i}": sample.features.contiguous(), f"last.{i}": last.contiguous()}
    save_file(tensors, folder / "samples.safetensors")
    plan = []
    for step in range(steps):
        picks = step_indices(step, len(samples), cfg.train.batch_size, cfg.train.seed)
        chosen = [samples[i] for _, i in picks]
        anchors = draw_anchors(chosen, picks, cfg.train.anchors, cfg.train.seed)
        plan.append([[i, a.tolist()] for (_, i), a in zip(picks, anchors, strict=True)])
    slots = cfg.train.batch_size * cfg.train.anchors * drafter.cfg.block_size
    tokens = max(sum(len(samples[i].ids) for i, _ in step) for step in plan)
    task: dict[str, Any] = {
        "target": str(cfg.target_path.absolute()),
        "dtype": str(resolve_dtype(cfg.target.dtype)).removeprefix("torch."),
        "names": [[s.sample_id, s.domain] for s in samples],
        "train": asdict(cfg.train) | {"steps": steps, "gamma": gamma_of(cfg)},
        "drafter": asdict(drafter.cfg),
        "plan": plan,
        # Tokens of their packed row. It has room for a block after the last anchor. It is also
        # longer than its slots: then they project only the rows of slots, as at default sizes.
        "row": max(tokens + drafter.cfg.block_size, slots + 1),
    }
    (folder / "task.json").write_text(json.dumps(task))
