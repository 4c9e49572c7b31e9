"""One target engine that computes features, checks them and writes whole shards."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import pyarrow as pa
import torch
from torch import Tensor

from dflash.identity import target_id
from dflash.target_model import (
    Features,
    Target,
    load_borrowed,
    load_target,
    resolve_dtype,
    top_logprobs,
)
from jobs.base.config import Config
from jobs.base.devices import compute_device, compute_dtype, served_dtype
from jobs.base.target_facts import target_config, target_taps
from jobs.harvesting.screening import (
    Fault,
    screen,
    too_long,
)
from store.feature_codec import DTYPES
from store.feature_shards import write_shard
from store.features import features_row, top_row
from store.place import Place
from store.schemas import features_schema

PREFIX = 32
"""Tokens of a prompt by which samples are sorted, so that equal beginnings share a batch."""


Row = dict[str, Any]


class Backend(Protocol):
    """A harvest engine: computes the features of a batch of token id sequences."""

    def features(self, batch: Sequence[Sequence[int]], taps: Sequence[int]) -> list[Features]:
        """Outputs of the tapped layers and last hidden states of each sequence."""
        ...

    def room(self) -> float:
        """The most tokens that a sequence may have; inf without a limit."""
        ...


@dataclass
class Harvested:
    """What was made of some samples: FEATURE_INDEX rows of a shard, and SET_ASIDE rows."""

    index: pa.Table
    aside: list[Row]


class Harvester:
    """One target engine; writes whole shards. A Ray actor is one of these in its own process."""

    def __init__(self, cfg: Config, threads: int):
        torch.set_num_threads(threads)
        self.cfg, self.taps = cfg, target_taps(cfg)
        self.identity = target_id(cfg.target_path)
        self.engine, self.dtype = engine(cfg), DTYPES[cfg.harvest.features]
        self.backend, self.head = make_backend(cfg)

    def shard(self, place: Place, chunk: pa.Table) -> Harvested:
        """Harvest the samples of a chunk (missing_features.CHUNK) into one shard below `place`,
        which is named after the cache key; no shard if all of them are set aside.
        """
        hidden, top_k = target_config(self.cfg)["hidden_size"], self.cfg.harvest.top_k
        schema = features_schema(self.identity, list(self.taps), hidden, self.dtype, top_k)
        aside: list[Row] = []
        return Harvested(write_shard(place, schema, self._rows(place.name, chunk, aside)), aside)

    def _rows(self, key: str, chunk: pa.Table, aside: list[Row]) -> Iterator[Row]:
        """FEATURES rows of the samples that pass the checks, a batch at a time; the others are
        added to `aside`.
        """
        fit = []
        for row in chunk.to_pylist():
            if fault := too_long(row, self.backend.room()):
                aside.append(self._aside(row, key, fault))
            else:
                fit.append(row)
        for batch in batches(fit, self.cfg.harvest.batch_tokens):
            ids = [[*row["prompt_ids"], *row["output_ids"]] for row in batch]
            for row, features in zip(batch, self.backend.features(ids, self.taps), strict=True):
                if fault := screen(row, features, self.head):
                    aside.append(self._aside(row, key, fault))
                else:
                    top_k = self.cfg.harvest.top_k
                    yield feature_row(row, features, self.head, self.dtype, top_k)

    def _aside(self, row: Row, key: str, fault: Fault) -> Row:
        return aside_row(row, self.identity, key, fault) | self.engine


def make_backend(cfg: Config) -> tuple[Backend, Tensor]:
    """The engine that `harvest.backend` names, loaded, and the target's head [V, H]."""
    if cfg.harvest.backend == "vllm":
        from serving.extract import Extractor
        from serving.vllm_server import vllm_runs_on_cpu

        dtype = served_dtype(cfg)
        head = load_borrowed(cfg.target_path, dtype)[1].to(compute_device(cfg))
        share = 1.0 if vllm_runs_on_cpu() else cfg.harvest.gpus
        return Extractor(cfg.target_path, target_taps(cfg), dtype, gpu_share=share), head
    target: Target = load_target(cfg.target_path, compute_dtype(cfg), compute_device(cfg))
    return target, target.head


def engine(cfg: Config) -> dict[str, str]:
    """What computes the features: `backend` and `dtype`, as in SET_ASIDE rows.

    target.device=cuda without a GPU is no error here: the driver of a cluster may have none.
    """
    if cfg.harvest.backend == "vllm":
        dtype = served_dtype(cfg)
    else:
        device = cfg.target.device
        dtype = resolve_dtype(cfg.target.dtype, compute_device(cfg) if device == "auto" else device)
    return {"backend": cfg.harvest.backend, "dtype": str(dtype).removeprefix("torch.")}


def feature_row(row: Row, features: Features, head: Tensor, dtype: str, top_k: int = 0) -> Row:
    """The FEATURES row of a sample in a dtype of store.feature_codec; with `top_k`, also the
    log-probabilities of that many tokens at each output position.
    """
    ids = [*row["prompt_ids"], *row["output_ids"]]
    num_taps = features.taps.shape[1] // features.last.shape[1]
    taps = features.taps.to(torch.bfloat16)
    found = features_row(row["sample_id"], ids, taps, dtype, num_taps)
    if top_k:
        first = len(row["prompt_ids"])
        last = features.last[first - 1 : len(ids) - 1].to(head.device, head.dtype)
        top_ids, logprobs = top_logprobs(last, head, top_k)
        found |= top_row(found, top_ids.numpy(), logprobs.numpy())
    return found


def aside_row(row: Row, identity: str, key: str, fault: Fault) -> Row:
    """The SET_ASIDE row of a sample that failed a check; `key`: name of its features folder."""
    return {
        "sample_id": row["sample_id"],
        "target_id": identity,
        "features_key": key,
        "domain": row["domain"],
        "reason": fault.reason,
        "detail": json.dumps(fault.numbers),
        "tokens": len(row["prompt_ids"]) + len(row["output_ids"]),
        "found_at": datetime.now(UTC),
    }


def batches(rows: list[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Batches of rows with similar prompt beginnings and lengths. A padded batch has at most
    `batch_tokens` tokens, unless a single row has more.

    The backend computes a prompt prefix that a whole batch shares only once.
    """
    batch: list[Row] = []

    def order(row: Row) -> tuple[list[int], int]:
        return row["prompt_ids"][:PREFIX], len(row["prompt_ids"]) + len(row["output_ids"])

    for row in sorted(rows, key=order):
        longest = len(row["prompt_ids"]) + len(row["output_ids"])
        if batch and longest * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
