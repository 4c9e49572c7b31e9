"""The training loop of one Ray Train worker (rank).

All randomness is derived from (seed, step). So a state need not keep random generators, and a run
can be resumed with another number of workers. Each rank computes sums. They are added up over ranks
and micro-batches, and divided once by the weight of the whole step.
"""

import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import Tensor, distributed

from dflash.batches import Batch
from dflash.checkpoint import load_drafter, save_drafter
from dflash.drafter_config import DrafterConfig
from dflash.frozen_head import Candidates
from dflash.lora import merged
from dflash.losses import choose_labels, choose_weights, default_gamma
from dflash.model import Drafter, drafter_of
from dflash.optim import build_optimizers, lr_scale, update_average
from dflash.parallel import (
    clip_gradients,
    load_whole_state,
    shard,
    sum_gradients,
    whole_state,
    whole_weights,
)
from dflash.target_model import load_borrowed, resolve_dtype, resolve_training_dtype
from dflash.training_step import (
    NonFiniteLoss,
    check_finite,
    generator,
    random_drafts,
    rank_picks,
    step_batch,
    step_indices,
    step_loss,
    to_device,
)
from dflash.vocabulary import frequent_tokens, set_vocabulary
from jobs.base.cluster import on_node
from jobs.base.config import Config
from jobs.base.devices import peak_memory
from jobs.base.drafter_folders import MARK, with_local_base
from jobs.base.drafter_shape import export_dtype
from jobs.tracking.mlflow_runs import Tracker
from jobs.training.feed import (
    LazySamples,
    prefetched,
    training_features,
    training_set,
    val_requests,
)
from jobs.training.progress import progress_of
from jobs.training.runs import Pin, read_pin
from jobs.training.start import label_tokens, start_drafter
from jobs.training.states import (
    commit_state,
    has_ended,
    newest_state,
    read_state,
    write_result,
)
from jobs.training.validation import Choice, as_exported, replay_val
from store.lease import Lost, check_latest


def worker(config: dict[str, Any]) -> None:
    """One rank, as Ray Train calls it. A restarted group continues from the newest state."""
    cfg, name = with_local_base(on_node(config["cfg"], config["home"])), config["name"]
    context = ray.train.get_context()
    rank = context.get_world_rank()
    if has_ended(cfg, name):  # in the group before a restart, a rank ended the run
        ray.train.report({})
        return
    try:
        tracker = Tracker.join(cfg, config["mlflow_run"])
        loop = Loop(cfg, name, config["shape"], tracker, partial(check_latest, *config["lease"]))
        result: dict[str, Any] = _run(loop)
    except NonFiniteLoss as error:  # every rank raises it, and every retry would
        result = {"error": str(error)}
        if rank == 0:
            write_result(cfg, name, result)
    except Lost:  # the run is somebody else's now, and so is its result
        raise
    except ValueError as error:  # from data, features or a state; maybe on this rank only
        result = {"stopped": str(error)}
        write_result(cfg, name, result)
        if context.get_world_size() > 1:
            raise  # Ray then ends the other ranks, which wait for this one
    # The report is a barrier: no rank leaves before the export and the result are written.
    ray.train.report(result)


def _run(loop: "Loop") -> dict[str, Any]:
    """Train from the newest state to the end; rank 0 writes the result and the drafter."""
    newest = newest_state(loop.cfg, loop.name)
    if newest is not None:
        loop.load(read_state(newest))
    with loop.tracker.system_metrics() if loop.rank == 0 else nullcontext():
        loop.train()
    result = loop.metrics()
    if loop.rank == 0:
        loop.check()
        # Before the export: a drafter folder marks the end.
        write_result(loop.cfg, loop.name, result)
        loop.export()
    return result


class Loop:
    """A rank's training state and its steps.

    check: is called before anything is committed, and raises if another command has taken over.
    """

    def __init__(
        self,
        cfg: Config,
        name: str,
        shape: DrafterConfig,
        tracker: Tracker,
        check: Callable[[], None],
    ):
        self.check = check
        self.cfg, self.train_cfg, self.tracker = cfg, cfg.train, tracker
        self.name, self.progress = name, progress_of(cfg, name)
        context = ray.train.get_context()
        self.rank, self.world = context.get_world_rank(), context.get_world_size()
        self.device = ray.train.torch.get_device()
        self.replayed = resolve_dtype(cfg.target.dtype, self.device.type)
        self.dtype = resolve_training_dtype(cfg.train.dtype, self.replayed, self.device.type)
        embedding, head = load_borrowed(cfg.target_path, self.dtype)
        self.embedding = embedding.to(self.device)
        self.head = self.embedding if head is embedding else head.to(self.device)
        self.sharded = cfg.train.shard == "fsdp"
        self.drafter = self._start(shape)
        self.averaged = self._start(shape) if cfg.train.ema else self.drafter
        self.stored = export_dtype(cfg)
        self._load_data(read_pin(cfg, name, shape))
        self.params = [p for p in self.drafter.parameters() if p.requires_grad]
        self.optimizers = build_optimizers(
            self.drafter, cfg.train.optimizer, cfg.train.lr, self.dtype
        )
        self.step, self.seconds, self.slots = 0, 0.0, 0
        self.choice, self.best_weights = Choice(), {}
        self._keep(self._weights())
        self.history: list[dict[str, float]] = []
        self.counts = torch.zeros(2 * self.drafter.cfg.num_drafts, dtype=torch.float64)

    def _start(self, shape: DrafterConfig) -> Drafter:
        drafter = start_drafter(self.cfg, shape).to(self.device)
        if self.sharded:
            shard(drafter)
        return drafter

    def _load_data(self, pin: Pin) -> None:
        cfg, shape = self.train_cfg, self.drafter.cfg
        self.val = val_requests(self.cfg, pin)
        self.data = training_set(self.cfg, pin, shape.num_drafts)
        features = training_features(self.cfg, self.data)
        self.samples = LazySamples(self.data.samples, features)
        self.lengths = self.data.lengths
        self.labels = choose_labels(cfg.loss, len(self.head))
        gamma = cfg.gamma or default_gamma(shape.block_size)
        self.weigh = choose_weights(cfg.weights, gamma)
        self.weigh_selector = choose_weights(cfg.selector_weights, gamma)
        named = label_tokens(self.data.samples, self.labels, shape)
        self.candidates = Candidates(named, len(self.head), cfg.random_candidates)
        self.candidates.position = self.candidates.position.to(self.device)
        if shape.draft_vocab_size:
            # A base keeps its tokens. Their rows come from this target's head, which may have
            # changed since the base was trained.
            answers = (sample.ids[sample.loss_mask] for sample in self.data.samples)
            ids = (
                self.drafter.draft_head(self.head)[0]
                if cfg.base
                else frequent_tokens(answers, shape.draft_vocab_size, len(self.head))
            )
            for drafter in (self.drafter, self.averaged):
                set_vocabulary(drafter, self.head, ids)

    def train(self) -> None:
        """Run the remaining steps; validate and save on the way.

        Raises NonFiniteLoss.
        """
        cfg = self.train_cfg
        if self.step == 0 and cfg.base:  # so that nothing worse than the base is exported
            self._validate()
        steps = () if self._out_of_patience() else range(self.step, cfg.steps)
        started = time.perf_counter()
        for batches in prefetched(self._batches, steps):
            self._one_step(batches)
            self.seconds += time.perf_counter() - started
            if self.rank == 0:
                self.progress.advance(self.step)
            if self.step % cfg.val_every == 0 or self.step == cfg.steps:
                self._validate()
            last = self.step == cfg.steps or self._out_of_patience()
            if self.step % cfg.checkpoint_every == 0 or last:
                self._save()
            if last:
                break
            started = time.perf_counter()

    def _batches(self, step: int) -> list[Batch]:
        """This rank's batches of a step, one per forward pass."""
        cfg, picks = self.train_cfg, self._picks(step)
        forwards = rank_picks(picks, self.lengths, self.rank, self.world, cfg.micro_batch)
        num_drafts = self.drafter.cfg.num_drafts
        if cfg.random_block:
            num_drafts = random_drafts(num_drafts, cfg.seed, step)
        self.samples.prefetch(i for mine in forwards for _, i in mine)
        packed = self.device.type == "cuda"  # there attention is flex attention
        batches = (
            step_batch(self.samples, mine, cfg.anchors, num_drafts, self.labels, cfg.seed, packed)
            for mine in forwards
        )
        return [to_device(batch, self.device, self.dtype) for batch in batches]

    def _picks(self, step: int) -> list[tuple[int, int]]:
        cfg, data = self.train_cfg, self.data
        others = len(data.samples) - data.num_main
        return step_indices(step, data.num_main, cfg.batch_size, cfg.seed, others, data.share)

    def _one_step(self, batches: list[Batch]) -> None:
        cfg = self.train_cfg
        parts = []
        for batch in batches:
            draw = generator("candidates", cfg.seed, self.step)
            borrowed = (self.embedding, self.head)
            weights = (self.weigh, cfg.tv, self.weigh_selector)
            out = step_loss(self.drafter, batch, *borrowed, self.candidates, draw, *weights)
            out.loss.backward()
            parts.append(out.sums())
        sums = torch.stack(parts).sum(0)
        if self.world > 1:
            distributed.all_reduce(sums)
            if not self.sharded:
                sum_gradients(self.params)
        loss, weight = sums[:2].tolist()
        picks = self._picks(self.step)
        names = [self.data.samples.name(i) for _, i in picks]
        check_finite("loss", loss, names, self.step)
        norm = self._gradients(weight)
        check_finite("gradient norm", norm, names, self.step)
        self._update()
        self.step += 1
        if cfg.ema:
            update_average(self.averaged, self.drafter, cfg.ema, self.step)
        self.slots += int(sums[2 + self.drafter.cfg.num_drafts :].sum())
        self.counts = self.counts + sums[2:].cpu()
        self.history.append({"loss": loss / weight, "grad_norm": norm})

    def _gradients(self, weight: float) -> float:
        """Divide the gradients by the step's weight and clip them; returns the unclipped norm."""
        for param in self.params:
            assert param.grad is not None
            param.grad.div_(weight)
        return clip_gradients(self.params, self.train_cfg.clip)

    def _update(self) -> None:
        """Take the optimizer step at the learning rate of this step."""
        scale = lr_scale(self.step, self.train_cfg.steps, self.train_cfg.warmup)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * scale
            optimizer.step()
            optimizer.zero_grad()

    def _validate(self) -> None:
        """Replay the val requests, and keep the weights if they are the best so far. Without val
        requests the latest weights are kept.
        """
        cfg, weights = self.train_cfg, self._weights()
        if not self.val:
            self._keep(weights)
            return
        drafter = as_exported(self.drafter.cfg, weights, self.stored, self.replayed)
        borrowed = (self.embedding.to(self.replayed), self.head.to(self.replayed))
        taus = replay_val(drafter, *borrowed, self.val, self.rank, self.world)
        if self.step == 0:
            self.choice.base = taus.domains
        if self.choice.offer(self.step, taus, cfg.domain, cfg.max_slice_loss):
            self._keep(weights)
        self._log(taus.metrics())

    def _weights(self) -> dict[str, Tensor]:
        """The weights to validate and export: the moving average if train.ema is set, with low-rank
        factors merged.
        """
        return merged(whole_weights(self.averaged))

    def _keep(self, weights: dict[str, Tensor]) -> None:
        if self.rank == 0:
            self.best_weights = {k: v.detach().to("cpu", copy=True) for k, v in weights.items()}

    def _out_of_patience(self) -> bool:
        return 0 < self.train_cfg.patience <= self.choice.stale

    def _save(self) -> None:
        """Commit a state that any number of workers can resume from. All ranks must call it."""
        state = whole_state(self.drafter, self.optimizers) | {
            "step": self.step,
            "choice": self.choice.state(),
            "best_weights": self.best_weights,
            "seconds": self.seconds,
            "slots": self.slots,
        }
        if self.train_cfg.ema:
            state["averaged"] = whole_state(self.averaged, [])
        self._log({})  # before the state: a resumed run would never log these steps
        if self.rank == 0:
            self.check()
            commit_state(self.cfg, self.name, self.step, state)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state of `_save`."""
        load_whole_state(self.drafter, self.optimizers, state)
        if self.train_cfg.ema:
            load_whole_state(self.averaged, [], state["averaged"])
        self.choice = Choice(**state["choice"])
        for name in ("step", "best_weights", "seconds", "slots"):
            setattr(self, name, state[name])

    def export(self) -> None:
        """Write the best weights as a drafter folder: on a local disk under a hidden name until it
        is complete, in a bucket with config.json last.
        """
        place = self.cfg.place("drafters", self.name)
        if place.has(MARK):  # an earlier group was killed after its export
            return
        beside = place.path.parent if place.is_local else self.cfg.path("drafters")
        partial = beside / f".{self.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        best = drafter_of(self.drafter.cfg, self.best_weights)
        save_drafter(best, partial, self.stored)
        load_drafter(partial)  # a drafter that cannot be read back never gets its final name
        self.check()
        if place.is_local:
            partial.rename(place.path)
        else:
            place.publish(partial, MARK)
            shutil.rmtree(partial)

    def metrics(self) -> dict[str, float]:
        """The metrics for Ray Train and the summary."""
        return {
            "step": self.step,
            "best_val_tau": self.choice.tau,
            "best_step": self.choice.step,
            "slots_per_second": self.slots / self.seconds if self.seconds else 0.0,
            "seconds": self.seconds,
            "peak_memory_bytes": peak_memory(self.device),
            "samples_without_anchor": self.data.num_skipped,
        }

    def _log(self, values: dict[str, float]) -> None:
        """Send metrics of the steps since the last call to MLflow, and further values of this step.
        Only rank 0 sends.
        """
        if self.rank == 0:
            hits_K, slots_K = self.counts.view(2, -1)
            accuracy = {
                f"train_accuracy_{k}": float(hits / slots)
                for k, (hits, slots) in enumerate(zip(hits_K, slots_K, strict=True), 1)
                if slots
            }
            running = self.metrics()
            shown = ("slots_per_second", "seconds", "peak_memory_bytes", "samples_without_anchor")
            running = {name: running[name] for name in shown}
            self.tracker.log(self.step, self.history, accuracy | running | values)
        self.history, self.counts = [], torch.zeros_like(self.counts)
