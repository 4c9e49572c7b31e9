"""flywheel train [train.steps=400] [train.base=FOLDER] [train.workers=2]

Traffic + features -> <work>/drafters/<run name>, a folder that vLLM serves. Runs on Ray Train; the
run's name is a hash of its data and settings, so the same command resumes or finds its result, and
other data or settings never do. The exported weights are those with the best replayed tau on the
val split.
"""

import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor, distributed

from dflash.acceptance import tau
from dflash.checkpoint import load_drafter, read_config, save_drafter
from dflash.lora import add_lora, merged
from dflash.loss import Candidates, Sample, valid_anchors
from dflash.model import Drafter, drafter_of, new_drafter
from dflash.objective import choose_labels, choose_weights, default_gamma
from dflash.optim import build_optimizers, lr_scale, update_average
from dflash.replay import Request, replay
from dflash.target import load_borrowed, resolve_dtype, target_id
from dflash.train import (
    check_finite,
    generator,
    mixed_precision,
    random_drafts,
    step_batch,
    step_indices,
    step_loss,
)
from jobs.cli import run_as_module
from jobs.cluster import cluster
from jobs.config import Config
from jobs.console import print_table
from jobs.harvest import features_folder
from jobs.progress import advance, follow
from jobs.samples import captured_top_k, check_features, load_requests, load_samples
from jobs.shape import drafter_config, target_config, target_taps
from jobs.tracking import Tracker
from store.ids import short_hash
from store.shards import read_manifests
from store.traffic import read_traffic

EXPORT_DTYPE = torch.bfloat16
STATE = "state.pt"


def run(cfg: Config) -> dict[str, Any]:
    """Train (or resume, or find finished) the run of this data and these settings.

    Raises ValueError without training samples, for a base drafter of another target shape, and for
    a non-finite loss.
    """
    name, num_samples = run_name(cfg)
    folder = cfg.path("drafters", name)
    reused = (folder / "config.json").is_file()
    result: dict[str, Any] = {}
    if not reused:
        shape = _shape(cfg)
        check_features(cfg)  # before Ray starts, which would retry what cannot succeed
        tracker = Tracker.start(cfg, name, inputs=_inputs(cfg))
        tracker.params(asdict(cfg.train) | {"samples": num_samples} | asdict(shape))
        with cluster(cfg):
            result = _fit(cfg, name, tracker.run_id)
        tracker.end()
    drafter = load_drafter(folder)
    summary = {
        "stage": "train",
        "name": name,
        "folder": str(folder),
        "reused": reused,
        "samples": num_samples,
        "parameters": sum(p.numel() for p in drafter.parameters()),
        **result,
    }
    shown = ["name", "samples", "parameters", "best_val_tau", "best_step", "slots_per_second"]
    print_table("Drafter", shown, [[summary.get(key) for key in shown]])
    return summary


def run_name(cfg: Config) -> tuple[str, int]:
    """(`drafter-<hash of data and settings>`, number of training samples)."""
    identity = target_id(cfg.target_path)
    train = read_traffic(cfg.path("traffic"), identity, "train")
    if train.num_rows == 0:
        raise ValueError(
            f"{cfg.path('traffic')} has no training sample of target {identity}: "
            "run `flywheel ingest` with more conversations"
        )
    val = read_traffic(cfg.path("traffic"), identity, "val")
    shape = asdict(_shape(cfg))
    settings = asdict(cfg.train) | {"dtype": cfg.target.dtype, "top_k": captured_top_k(cfg)}
    data = [table["sample_id"].to_pylist() for table in (train, val)]
    return f"drafter-{short_hash([identity, data, shape, settings])[:12]}", train.num_rows


def _shape(cfg: Config):
    if not cfg.train.base:
        return drafter_config(cfg)
    ours = drafter_config(cfg)
    base = read_config(cfg.train.base, ours.num_target_layers)
    for field in ("hidden_size", "vocab_size", "num_target_layers", "target_layer_ids"):
        if getattr(base, field) != getattr(ours, field):
            raise ValueError(
                f"train.base {cfg.train.base} has {field} {getattr(base, field)}, but this target "
                f"and drafter.taps give {getattr(ours, field)}: it was made for other features"
            )
    return base


def _inputs(cfg: Config) -> dict[str, Any]:
    identity = target_id(cfg.target_path)
    return {
        "traffic": [m["key"] for m in read_manifests(cfg.path("traffic"))],
        "features": [m["key"] for m in read_manifests(features_folder(cfg, identity))],
        "target_id": identity,
        "target_layer_ids": list(target_taps(cfg)),
    }


def _fit(cfg: Config, name: str, mlflow_run: str) -> dict[str, Any]:
    cpus = max(1, int(ray.cluster_resources().get("CPU", 1)) // cfg.train.workers)
    trainer = TorchTrainer(
        _worker,
        train_loop_config={"cfg": cfg, "name": name, "mlflow_run": mlflow_run},
        scaling_config=ScalingConfig(
            num_workers=cfg.train.workers, resources_per_worker={"CPU": cpus}
        ),
        run_config=RunConfig(
            name=name,
            storage_path=str(cfg.path("runs").resolve()),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=2),
        ),
    )
    try:
        with follow(progress_file(cfg, name), cfg.train.steps, "train", "step"):
            result = trainer.fit()
    except ray.train.TrainingFailedError as error:
        cause = next(iter(getattr(error, "worker_failures", {}).values()), error)
        raise ValueError(f"training {name} failed: {cause}") from error
    metrics = result.metrics or {}
    keys = ("best_val_tau", "best_step", "loss", "slots_per_second", "seconds")
    return {key: metrics[key] for key in keys if key in metrics}


def _worker(config: dict[str, Any]) -> None:
    """One rank. Everything random follows from (seed, step): resuming needs no random state."""
    cfg, name = config["cfg"], config["name"]
    loop = Loop(cfg, name, Tracker.join(cfg, config["mlflow_run"]))
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as path:
            loop.load(Path(path))
    loop.train()
    if loop.rank == 0:
        loop.export(cfg.path("drafters", name))
    # The last report is a barrier: no rank leaves before the export stands.
    ray.train.report(loop.metrics())


class Loop:
    """A rank's training state and its steps."""

    def __init__(self, cfg: Config, name: str, tracker: Tracker):
        self.progress = progress_file(cfg, name)
        self.cfg, self.train_cfg, self.tracker = cfg, cfg.train, tracker
        context = ray.train.get_context()
        self.rank, self.world = context.get_world_rank(), context.get_world_size()
        dtype = resolve_dtype(cfg.target.dtype)
        self.embedding, self.head = load_borrowed(cfg.target_path, dtype)
        self.samples = trainable(load_samples(cfg, ["train"])["train"])
        self.val = load_requests(cfg, "val")[1][: cfg.train.val_samples]
        self.drafter = start_drafter(cfg)
        self.optimizers = build_optimizers(self.drafter, cfg.train.optimizer, cfg.train.lr, dtype)
        gamma = cfg.train.gamma or default_gamma(self.drafter.cfg.block_size)
        self.weigh = choose_weights(cfg.train.weights, gamma)
        self.labels = choose_labels(cfg.train.loss, len(self.head))
        named = torch.cat([self.labels(s)[0][s.loss_mask].flatten() for s in self.samples])
        self.candidates = Candidates(
            named.unique().long(), len(self.head), cfg.train.random_candidates
        )
        self.step, self.best, self.seconds, self.slots = 0, {"tau": 0.0, "step": -1}, 0.0, 0
        self.average: dict[str, Tensor] | None = None
        self.best_state = self._copy_state()
        if cfg.train.ema:
            self.average = self._copy_state()
        self.history: list[dict[str, float]] = []

    def train(self) -> None:
        """Run the remaining steps; validate and report on the way."""
        cfg = self.train_cfg
        if self.step == 0 and cfg.base:  # never export what is worse than the base
            self._validate()
        while self.step < cfg.steps:
            started = time.perf_counter()
            self._one_step()
            self.seconds += time.perf_counter() - started
            if self.rank == 0:
                advance(self.progress, self.step)
            last = self.step == cfg.steps
            if self.step % cfg.val_every == 0 or last:
                self._validate()
            if self.step % cfg.checkpoint_every == 0 or last:
                self._report()

    def _one_step(self) -> None:
        cfg = self.train_cfg
        picks = step_indices(self.step, len(self.samples), cfg.batch_size, cfg.seed)
        mine = picks[self.rank :: self.world]
        num_drafts = self.drafter.cfg.num_drafts
        if cfg.random_block:
            num_drafts = random_drafts(num_drafts, cfg.seed, self.step)
        batch = step_batch(self.samples, mine, cfg.anchors, num_drafts, self.labels, cfg.seed)
        draw = generator("candidates", cfg.seed, self.step)
        borrowed = (self.embedding, self.head)
        out = step_loss(self.drafter, batch, *borrowed, self.candidates, draw, self.weigh, cfg.tv)
        totals = self._sum(torch.stack([out.loss.detach().double(), out.weight.double()]))
        check_finite(totals[0], [self.samples[i].sample_id for _, i in picks], self.step)
        (out.loss / totals[1]).backward()
        norm = self._clip_and_step(lr_scale(self.step, cfg.steps, cfg.warmup))
        self.step += 1
        if self.average is not None:
            current = merged(self.drafter.state_dict())
            update_average(self.average, current, cfg.ema, self.step)
        self.slots += out.slots * self.world
        self.history.append({"loss": float(totals[0] / totals[1]), "grad_norm": norm})

    def _clip_and_step(self, scale: float) -> float:
        params = [p for p in self.drafter.parameters() if p.requires_grad]
        for param in params:
            assert param.grad is not None
            self._sum(param.grad)
        norm = torch.nn.utils.clip_grad_norm_(params, self.train_cfg.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("peak_lr", group["lr"]) * scale
            optimizer.step()
            optimizer.zero_grad()
        return float(norm)

    def _sum(self, tensor: Tensor) -> Tensor:
        if self.world > 1:
            distributed.all_reduce(tensor)
        return tensor

    def _validate(self) -> None:
        if self.rank != 0:
            return
        drafter = drafter_of(self.drafter.cfg, self._weights())
        value = val_tau(drafter, self.embedding, self.head, self.val)
        if value is not None and value > self.best["tau"]:
            self.best = {"tau": value, "step": self.step}
            self.best_state = self._copy_state()
        elif value is None:
            self.best_state = self._copy_state()
        self.tracker.log(self.step, self.history, value, self.seconds, self.slots)
        self.history = []

    def _report(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if self.rank == 0:
                self.save(Path(folder))
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report(self.metrics(), checkpoint=checkpoint)

    def metrics(self) -> dict[str, float]:
        """What Ray Train and the summary get to see."""
        rate = self.slots / self.seconds if self.seconds else 0.0
        return {
            "step": self.step,
            "best_val_tau": self.best["tau"],
            "best_step": self.best["step"],
            "slots_per_second": rate,
            "seconds": self.seconds,
        }

    def save(self, folder: Path) -> None:
        """Everything a resumed rank needs; Ray Train moves the folder into place atomically."""
        state = {
            "step": self.step,
            "drafter": self.drafter.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "best": self.best,
            "best_state": self.best_state,
            "average": self.average,
            "seconds": self.seconds,
            "slots": self.slots,
        }
        torch.save(state, folder / STATE)

    def load(self, folder: Path) -> None:
        """Continue where `save` was called."""
        state = torch.load(folder / STATE, weights_only=True)
        self.drafter.load_state_dict(state["drafter"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for name in ("step", "best", "best_state", "average", "seconds", "slots"):
            setattr(self, name, state[name])

    def export(self, folder: Path) -> None:
        """Write the best weights as a drafter folder, under a hidden name until complete."""
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        save_drafter(drafter_of(self.drafter.cfg, self.best_state), partial, EXPORT_DTYPE)
        partial.rename(folder)

    def _weights(self) -> dict[str, Tensor]:
        """What is validated and exported: the average if there is one, low-rank factors merged."""
        return self.average or merged(self.drafter.state_dict())

    def _copy_state(self) -> dict[str, Tensor]:
        return {name: t.detach().clone() for name, t in self._weights().items()}


def progress_file(cfg: Config, name: str) -> Path:
    """Where rank 0 says which step is done."""
    return cfg.path("runs", f".{name}.step")


def start_drafter(cfg: Config) -> Drafter:
    """The drafter that training starts from: train.base, with low-rank factors, or a new one."""
    if not cfg.train.base:
        return new_drafter(drafter_config(cfg), cfg.train.seed)
    layers = target_config(cfg)["num_hidden_layers"]
    base = load_drafter(cfg.train.base, target_layers=layers)
    if not cfg.train.lora_rank:
        return base
    return add_lora(base, cfg.train.lora_rank, cfg.train.lora_targets, cfg.train.seed)


def trainable(samples: list[Sample]) -> list[Sample]:
    """Samples with at least one anchor. Raises ValueError if that leaves none."""
    kept = [s for s in samples if len(valid_anchors(s.loss_mask))]
    if not kept:
        raise ValueError(
            f"none of {len(samples)} training samples has two supervised tokens in a row: "
            "look at loss_mask in traffic/"
        )
    return kept


def val_tau(
    drafter: Drafter, embedding: Tensor, head: Tensor, requests: list[Request]
) -> float | None:
    """Replayed tau at full K; None without val requests."""
    if not requests:
        return None
    with mixed_precision(embedding.dtype):
        return tau(replay(drafter, embedding, head, requests, drafter.cfg.num_drafts))


if __name__ == "__main__":
    run_as_module("train")
