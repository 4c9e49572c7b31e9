"""flywheel train --plan: what a training run would do and need. It reads no features or weights."""

import shutil
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pyarrow as pa
import torch

from dflash.checkpoint import read_config
from dflash.drafter_config import DrafterConfig
from dflash.lora import add_lora
from dflash.losses import choose_labels, named_tokens
from dflash.model import Drafter
from dflash.target_model import resolve_dtype, resolve_training_dtype, ties_embeddings
from dflash.training_memory import activation_bytes, head_bytes, model_bytes, selector_bytes
from jobs.base.config import Config, taken_profile
from jobs.base.console import console, print_table, short_name, some_names
from jobs.base.devices import compute_device
from jobs.base.drafter_shape import drafter_config, export_dtype, misfits, warm_shape
from jobs.base.target_facts import target_config
from jobs.dataset.samples import CACHE_BYTES, captured_top_k
from jobs.dataset.slices import largest_rows
from jobs.training.feed import GIB, TrainingSet, training_set, val_rows
from jobs.training.runs import choose_run, missing
from jobs.training.states import KEEP, find_states, state_step

PROCESS_BYTES = 700 << 20
"""A worker with torch, Ray and MLflow imported, before it loads anything (measured, Linux)."""

MANY_EPOCHS = 50
COMPLETE = "complete"
LABEL_BYTES = 12
"""Bytes of one entry of a slot's label: int64 id and float32 probability (dflash/batches.py)."""

Facts = dict[str, Any]


def run_shape(cfg: Config) -> DrafterConfig:
    """The shape of train.base, or of a new drafter.

    Raises ValueError for a base that does not fit this target's shape and taps.
    """
    if not cfg.train.base:
        return drafter_config(cfg)
    base = read_config(cfg.train.base, target_config(cfg)["num_hidden_layers"])
    for field, (has, needed) in misfits(cfg, base).items():
        raise ValueError(
            f"train.base {cfg.train.base} has {field} {has}, but this target and drafter.taps give "
            f"{needed}: it was made for other features" + _other_taps(field, base)
        )
    shape = warm_shape(cfg, base)
    if cfg.train.part == "head" and not shape.is_dflash2:
        raise ValueError("train.part=head: the base has no head of its own; drafter.head=dflash2")
    return shape


def _other_taps(field: str, base: DrafterConfig) -> str:
    if field != "target_layer_ids":
        return ""
    taps = ",".join(map(str, base.target_layer_ids))
    return f"; put drafter.taps={taps} into the config file and run `flywheel harvest`"


def check_val(cfg: Config, val: pa.Table) -> None:
    """Raise ValueError when the settings need val requests that do not exist."""
    domains = set(val["domain"].to_pylist())
    if cfg.train.domain and domains and cfg.train.domain not in domains:
        raise ValueError(
            f"no greedy val request of train.domain {cfg.train.domain!r} (there are: "
            f"{some_names(domains)}): nothing can choose its weights; ingest more "
            "conversations or raise ingest.val_percent"
        )
    if cfg.train.patience and not domains:
        raise ValueError("train.patience needs greedy val requests: raise ingest.val_percent")


def check_lora(cfg: Config, shape: DrafterConfig) -> None:
    """Raise ValueError for train.lora_targets that the drafter does not have."""
    if cfg.train.lora_rank:
        with torch.device("meta"):
            drafter = Drafter(shape)
        add_lora(drafter, cfg.train.lora_rank, cfg.train.lora_targets, cfg.train.seed)


def make_plan(cfg: Config) -> Facts:
    """Everything that `--plan` prints. Reads token ids and file names, no features or weights."""
    shape = run_shape(cfg)
    chosen = choose_run(cfg, shape)
    name, pin = chosen.name, chosen.pin
    val, features = val_rows(cfg, pin), missing(cfg, pin) or COMPLETE
    with TemporaryDirectory() as folder:
        harvested = features == COMPLETE
        data = training_set(cfg, pin, shape.num_drafts, Path(folder), with_top=harvested)
    check_val(cfg, val)
    memory = memory_plan(cfg, shape, data, val)
    return {
        "name": name,
        "profile": taken_profile(cfg),
        **_start(cfg, name, features),
        "pinned_to": f"{len(pin.train)} train and {len(pin.val)} val samples",
        "samples_since": chosen.newer,
        "features": features,
        **_amount(cfg, data),
        "checkpoints": _checkpoints(cfg),
        "validations": _validations(cfg) if val.num_rows else 0,
        "val_requests": dict(Counter(val["domain"].to_pylist())),
        "chosen_by": _chosen_by(cfg, val),
        "memory_bytes": memory,
        "disk_bytes": disk_plan(cfg, shape),
    }


def _start(cfg: Config, name: str, features: str) -> Facts:
    if cfg.place("drafters", name).has("config.json"):
        return {"does": "reuse", "first_step": cfg.train.steps}
    if features != COMPLETE:
        return {"does": "refuse", "first_step": 0}
    states = find_states(cfg, name)
    if not states:
        return {"does": "start", "first_step": 0}
    return {"does": "resume", "first_step": state_step(max(states))}


def _amount(cfg: Config, data: TrainingSet) -> Facts:
    train, tokens = cfg.train, data.block_tokens
    picks = train.steps * train.batch_size
    parts = [("", tokens[: data.num_main], 1 - data.share)]
    if data.share:
        parts.append(("_others", tokens[data.num_main :], data.share))
    mean = sum(share * sum(part) / len(part) for _, part, share in parts)
    return {
        "steps": train.steps,
        "samples": len(data.samples),
        "samples_without_anchor": data.num_skipped,
        "samples_cut": data.num_cut,
        "tokens": sum(data.lengths),
        "supervised_tokens": data.supervised,
        "block_tokens_per_step": train.batch_size * mean,
        **{f"epochs{name}": picks * share / len(part) for name, part, share in parts},
    }


def _validations(cfg: Config) -> int:
    every, steps = cfg.train.val_every, cfg.train.steps
    return bool(cfg.train.base) + steps // every + bool(steps % every)


def _checkpoints(cfg: Config) -> str:
    if not cfg.train.steps:
        return "none"
    every = min(cfg.train.checkpoint_every, cfg.train.steps)
    return f"every {every} steps and the last; {KEEP} are kept, with the best weights in each"


def _chosen_by(cfg: Config, val: pa.Table) -> str:
    if not val.num_rows:
        return "nothing: no greedy val request, the last weights are exported"
    what = f"tau of {short_name(cfg.train.domain)}" if cfg.train.domain else "pooled tau"
    if not cfg.train.base or cfg.train.max_slice_loss >= 1:
        return f"highest {what}"
    kept = f"{1 - cfg.train.max_slice_loss:.0%} of the base's"
    return f"highest {what}, no domain with val requests below {kept}"


def memory_plan(
    cfg: Config, shape: DrafterConfig, data: TrainingSet, val: pa.Table
) -> dict[str, int]:
    """Estimated bytes of memory of rank 0, the largest worker, by purpose."""
    train = cfg.train
    kind = "cpu" if train.device == "cpu" else compute_device(cfg)
    dtype = resolve_training_dtype(train.dtype, resolve_dtype(cfg.target.dtype, kind), kind)
    width = len(shape.target_layer_ids) * shape.hidden_size
    share = -(-train.batch_size // train.workers)
    in_forward = min(train.micro_batch or share, share)
    longest = max(data.lengths)
    anchors = min(train.anchors, data.most_anchors)
    borrowed = 1 if ties_embeddings(cfg.target_path) else 2
    harvested = data.samples.top is not None
    labels = choose_labels(train.loss if harvested else "ce", shape.vocab_size)
    candidates = len(named_tokens(data.samples, labels)) + train.random_candidates
    candidates = min(candidates, shape.vocab_size)
    entry = LABEL_BYTES * (captured_top_k(cfg) if train.loss == "kl" else 1)
    lora = (train.lora_rank, tuple(train.lora_targets))
    model = model_bytes(
        shape, train.optimizer, train.workers if train.shard == "fsdp" else 1, *lora
    )
    whole = model_bytes(shape, train.optimizer, 1)["weights"]
    val_tokens = sum(sum(val[c].to_pylist()) for c in ("prompt_tokens", "output_tokens"))
    return {
        "process": PROCESS_BYTES,
        "embedding and head": borrowed * shape.vocab_size * shape.hidden_size * dtype.itemsize,
        **model,
        "best weights": whole,
        "weights that are validated": whole // 4 * dtype.itemsize if val.num_rows else 0,
        "average of weights": model["weights"] if train.ema else 0,
        "exchange with other workers": whole if train.workers > 1 else 0,
        "activations": activation_bytes(shape, in_forward, longest, anchors, dtype),
        "softmax": head_bytes(shape.hidden_size, candidates, dtype),
        "selector": selector_bytes(shape, in_forward * anchors * shape.num_drafts),
        "two steps of features": 2 * share * longest * width * dtype.itemsize,
        "two steps of labels": 2 * share * anchors * shape.num_drafts * entry,
        "feature cache": min(2 * width * sum(data.lengths), int(train.cache_gib * GIB)),
        "val features": min(2 * width * val_tokens, CACHE_BYTES),
    }


def disk_plan(cfg: Config, shape: DrafterConfig) -> dict[str, int]:
    """Bytes on disk: of the kept states, of the exported drafter, and free ones."""
    train = cfg.train
    model = model_bytes(shape, train.optimizer, 1, train.lora_rank, tuple(train.lora_targets))
    state = (3 if train.ema else 2) * model["weights"] + model["optimizer"]
    scratch = cfg.path()
    there = next(folder for folder in (scratch, *scratch.parents) if folder.is_dir())
    return {
        "one state": state,
        "states kept": KEEP * state,
        "drafter": model["weights"] // 4 * export_dtype(cfg).itemsize,
        "free": shutil.disk_usage(there).free,
    }


def print_plan(plan: Facts) -> None:
    """Print the plan as tables on stderr."""
    single = [(key, value) for key, value in plan.items() if not isinstance(value, dict)]
    print_table("Plan", ["what", "value"], single)
    val = {domain: [count] for domain, count in plan["val_requests"].items()}
    print_table("Val requests", ["domain", "replayed"], largest_rows(val))
    memory = plan["memory_bytes"] | {
        "total": sum(plan["memory_bytes"].values()),
        "free now": psutil.virtual_memory().available,
    }
    for title, sizes in (("Memory of a worker", memory), ("Disk", plan["disk_bytes"])):
        print_table(
            title, ["what", "MiB"], [(k, f"{v / (1 << 20):,.1f}") for k, v in sizes.items()]
        )
    for note in _notes(plan, memory):
        console.print(f"note: {note}")


def _notes(plan: Facts, memory: dict[str, int]) -> list[str]:
    """What a reader of the numbers should not miss."""
    found = []
    if plan["epochs"] > MANY_EPOCHS:
        found.append(
            f"{plan['epochs']:.0f} epochs of {plan['samples']} samples; published runs have 3 to "
            "6: lower train.steps or train.batch_size, or harvest more traffic"
        )
    if memory["total"] > memory["free now"]:
        found.append(
            "a worker needs more memory than is free here: try train.micro_batch=1, then a smaller "
            "train.cache_gib, then train.shard=fsdp with more workers"
        )
    return found
