"""flywheel harvest [harvest.backend=vllm] [harvest.workers=2]

<work>/traffic -> <work>/features/<cache key>: one teacher-forced pass of the target over prompt +
output of every sample that has no features yet. Each Ray actor holds one target and commits its own
shards; only shard facts travel through Ray.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import ray
import torch
from torch import Tensor
from tqdm import tqdm

from dflash.target import Features, load_target, resolve_dtype, target_id, top_logprobs
from jobs.cli import run_as_module
from jobs.cluster import cluster
from jobs.config import Config
from jobs.console import print_table
from jobs.serve import served_dtype
from jobs.shape import none_of_target, target_taps
from store.features import cache_key, encode
from store.ids import short_hash
from store.schemas import features_columns, features_schema
from store.shards import (
    ShardInfo,
    is_complete,
    read_dataset,
    shard_info,
    sweep,
    write_manifest,
    write_shard,
)
from store.traffic import read_traffic

FEATURE_DTYPE = "bfloat16"
CHECKED_POSITIONS = 16
PREFIX = 32
MIN_ARGMAX_MATCH = 0.9
"""Near ties make the recorded greedy token differ from our argmax now and then (98.75 % agreed in
bfloat16 on another engine); below this the features are not those of the model that answered."""

Row = dict[str, Any]


class Backend(Protocol):
    """What a harvest engine must do: features of a batch of token id sequences."""

    def features(self, batch: Sequence[Sequence[int]], taps: Sequence[int]) -> list[Features]:
        """Tap outputs and last hidden states of each sequence."""
        ...


def run(cfg: Config) -> dict[str, Any]:
    """Harvest every sample of traffic/ that has no features; returns the summary.

    Raises ValueError without traffic, and when features fail their checks (lengths, finite, not
    all zero, argmax agreement on greedy samples).
    """
    identity = target_id(cfg.target_path)
    folder = features_folder(cfg, identity)
    sweep(folder)
    traffic = read_traffic(cfg.path("traffic"), identity)
    if traffic.num_rows == 0:
        raise none_of_target(cfg, "sample", "run `flywheel ingest` first")
    columns = features_columns(cfg.harvest.top_k)
    done = set(read_dataset(folder, columns, columns=["sample_id"])["sample_id"].to_pylist())
    rows = traffic.select(["sample_id", "prompt_ids", "output_ids", "temperature"]).to_pylist()
    rows = [row for row in rows if row["sample_id"] not in done]
    shards = _harvest(cfg, rows, folder) if rows else []
    if shards:
        key = short_hash(sorted(row["sample_id"] for row in rows))
        write_manifest(folder, key, shards, {"samples": len(rows), "target_id": identity})
    summary = {
        "stage": "harvest",
        "backend": cfg.harvest.backend,
        "folder": str(folder),
        "samples": len(rows),
        "reused": len(done),
        "tokens": sum(s.tokens for s in shards),
        "bytes": sum(s.bytes for s in shards),
    }
    names = ["samples", "reused", "tokens", "bytes"]
    print_table("Features", names, [[summary[name] for name in names]])
    return summary


def features_folder(cfg: Config, identity: str, taps: Sequence[int] = ()) -> Path:
    """The cache folder of this target, these taps (default: the configured ones), this layout,
    this harvest.top_k.
    """
    key = cache_key(identity, list(taps or target_taps(cfg)), FEATURE_DTYPE, cfg.harvest.top_k)
    return cfg.path("features", key)


def _harvest(cfg: Config, rows: list[Row], folder: Path) -> list[ShardInfo]:
    size = cfg.harvest.samples_per_shard
    chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
    paths = [folder / f"{short_hash([r['sample_id'] for r in chunk])}.parquet" for chunk in chunks]
    missing = [(p, c) for p, c in zip(paths, chunks, strict=True) if not is_complete(p)]
    with cluster(cfg), tqdm(total=len(rows), desc="harvest", unit="sample") as bar:
        bar.update(len(rows) - sum(len(chunk) for _, chunk in missing))
        if missing:
            _run_actors(cfg, missing, bar)
    return [shard_info(path) for path in paths]


def _run_actors(cfg: Config, missing: list[tuple[Path, list[Row]]], bar: tqdm) -> None:
    threads = max(1, torch.get_num_threads() // cfg.harvest.workers)
    actors = [
        Harvester.options(num_cpus=threads).remote(cfg, threads)
        for _ in range(min(cfg.harvest.workers, len(missing)))
    ]
    pool: Any = ray.util.ActorPool(actors)
    for count in pool.map_unordered(_shard, missing):
        bar.update(count)


def _shard(actor: Any, item: tuple[Path, list[Row]]) -> Any:
    return actor.shard.remote(*item)


@ray.remote
class Harvester:
    """One target engine; writes whole shards."""

    def __init__(self, cfg: Config, threads: int):
        torch.set_num_threads(threads)
        self.cfg = cfg
        self.taps = target_taps(cfg)
        self.schema: pa.Schema | None = None
        self.identity = target_id(cfg.target_path)
        self.head = None
        self.backend = make_backend(cfg)

    def shard(self, path: Path, rows: list[Row]) -> int:
        """Harvest `rows` into the shard `path`; returns how many."""
        found = {}
        for batch in _batches(rows, self.cfg.harvest.batch_tokens):
            ids = [[*row["prompt_ids"], *row["output_ids"]] for row in batch]
            for row, features in zip(batch, self.backend.features(ids, self.taps), strict=True):
                found[row["sample_id"]] = feature_row(
                    row, features, self._head(), self.cfg.harvest.top_k
                )
        width = len(found[rows[0]["sample_id"]]["hi"]) // found[rows[0]["sample_id"]]["n_tokens"]
        schema = features_schema(
            self.identity,
            list(self.taps),
            width // len(self.taps),
            top_k=self.cfg.harvest.top_k,
        )
        table = pa.Table.from_pylist([found[row["sample_id"]] for row in rows], schema=schema)
        write_shard(path, table)
        return len(rows)

    def _head(self) -> Tensor:
        if self.head is None:
            from dflash.target import load_borrowed

            self.head = load_borrowed(self.cfg.target_path, backend_dtype(self.cfg))[1]
        return self.head


def make_backend(cfg: Config) -> Backend:
    """The engine that `harvest.backend` names, loaded."""
    dtype = backend_dtype(cfg)
    if cfg.harvest.backend == "vllm":
        from serving.extract import Extractor

        return Extractor(cfg.target_path, target_taps(cfg), dtype)
    return load_target(cfg.target_path, dtype)


def backend_dtype(cfg: Config) -> torch.dtype:
    """What the backend computes in: Transformers on the CPU, vLLM where it serves."""
    if cfg.harvest.backend == "vllm":
        return served_dtype(cfg)
    return resolve_dtype(cfg.target.dtype)


def feature_row(row: Row, features: Features, head: Tensor, top_k: int = 0) -> Row:
    """One FEATURES row, with TOP for top_k > 0. Raises ValueError naming the sample if a check
    fails.
    """
    num_tokens = len(row["prompt_ids"]) + len(row["output_ids"])
    name = row["sample_id"]
    if len(features.taps) != num_tokens:
        raise ValueError(
            f"sample {name}: {len(features.taps)} features for {num_tokens} tokens; "
            "is prefix caching on?"
        )
    wide = features.taps.float()
    if not bool(wide.isfinite().all()):
        raise ValueError(f"sample {name}: features are not finite")
    if bool((wide.square().mean(1) < 1e-12).any()) or float(wide.std(0).max()) == 0.0:
        raise ValueError(f"sample {name}: features are zero or the same at all positions")
    match = argmax_match(row, features.last, head)
    if row["temperature"] == 0.0 and match < MIN_ARGMAX_MATCH:
        raise ValueError(
            f"sample {name}: the target's argmax is the recorded greedy token at only {match:.0%} "
            "of the checked positions: this target did not write this answer"
        )
    hi, lo = encode(features.taps.to(torch.bfloat16))
    found = {"sample_id": name, "n_tokens": num_tokens, "hi": hi, "lo": lo, "argmax_match": match}
    return found | (top_columns(row, features.last, head, top_k) if top_k else {})


def top_columns(row: Row, last: Tensor, head: Tensor, top_k: int) -> Row:
    """The target's top_k tokens at every output position; the one at p was known at p - 1."""
    first = len(row["prompt_ids"])
    ids, logprobs = top_logprobs(last[first - 1 : first + len(row["output_ids"]) - 1], head, top_k)
    return {
        "top_ids": ids.flatten().numpy().astype(np.int32),
        "top_logprobs": logprobs.flatten().numpy().astype(np.float16),
    }


def argmax_match(row: Row, last: Tensor, head: Tensor) -> float:
    """Share of up to 16 evenly spaced output positions whose argmax is the recorded token."""
    num_output = len(row["output_ids"])
    picks = torch.linspace(0, num_output - 1, min(CHECKED_POSITIONS, num_output)).long()
    hidden = last[len(row["prompt_ids"]) - 1 + picks].contiguous()
    recorded = torch.tensor(row["output_ids"])[picks]
    return float(((hidden @ head.T).argmax(-1) == recorded).float().mean())


def _batches(rows: list[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Rows with a similar prompt and length; the padded rectangle holds at most `batch_tokens`.

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


if __name__ == "__main__":
    run_as_module("harvest")
