"""flywheel harvest [harvest.backend=vllm] [harvest.workers=2]

<work>/traffic -> <work>/features/<cache key>: one teacher-forced pass of the target over prompt +
output of every sample that has no features yet. Each Ray actor holds one target and commits its own
shards: token ids go to the actors, facts come back, features never travel through Ray. A sample
that fails a check is kept with its reason in <work>/set_aside and not tried again.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import ray
import torch
from torch import Tensor
from tqdm import tqdm

from dflash.target_model import (
    Features,
    Target,
    load_borrowed,
    load_target,
    target_id,
    top_logprobs,
)
from jobs.base.cli import run_as_module
from jobs.base.cluster import cluster, cpus_each
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.base.target_facts import (
    compute_device,
    compute_dtype,
    none_of_target,
    target_config,
    target_taps,
)
from jobs.harvesting.screening import REASONS, Fault, exceeds, screen, too_many
from jobs.serve import served_dtype
from store.features import cache_key, features_row, open_shard, top_row
from store.ids import short_hash
from store.mending import mend, publish, remember
from store.schemas import features_columns, features_schema
from store.set_aside import read_set_aside, write_set_aside
from store.shards import read_dataset, shard_info, sweep, write_shard
from store.traffic_table import read_traffic

FEATURE_DTYPE = "bfloat16"
PREFIX = 32
COLUMNS = ["sample_id", "domain", "prompt_ids", "output_ids", "temperature", "shaped"]
SHOWN_DAMAGED = 10

Row = dict[str, Any]


class Backend(Protocol):
    """What a harvest engine must do: features of a batch of token id sequences."""

    def features(self, batch: Sequence[Sequence[int]], taps: Sequence[int]) -> list[Features]:
        """Tap outputs and last hidden states of each sequence."""
        ...


@dataclass
class Harvested:
    """Facts of finished work: shards, samples in them, and SET_ASIDE rows."""

    paths: list[Path] = field(default_factory=list)
    samples: int = 0
    aside: list[Row] = field(default_factory=list)


def run(cfg: Config) -> dict[str, Any]:
    """Harvest every sample of traffic/ that has no features; returns the summary.

    Samples that fail a check are set aside. Raises ValueError without traffic, and, after all else
    is published, if the share of them is established above harvest.max_reject_rate.
    """
    identity = target_id(cfg.target_path)
    folder = features_folder(cfg, identity)
    sweep(folder)
    traffic = read_traffic(cfg.path("traffic"), identity).select(COLUMNS)
    if traffic.num_rows == 0:
        raise none_of_target(cfg, "sample", "run `flywheel ingest` first")
    done = published(cfg, identity, folder)
    known = read_set_aside(cfg.path("set_aside"), folder.name)
    mine = traffic["sample_id"].to_pylist()
    skip = pa.array([*done, *known], pa.string())
    found = _harvest(cfg, traffic.filter(~pc.field("sample_id").isin(skip)), folder)
    shards = [shard_info(path) for path in sorted(found.paths)]
    if shards:
        publish(folder, shards, {"samples": found.samples, "target_id": identity})
        remember(folder)
    write_set_aside(cfg.path("set_aside"), found.aside)
    known |= {row["sample_id"]: row for row in found.aside}
    aside = [known[name] for name in mine if name in known]
    summary = {
        "stage": "harvest",
        "backend": cfg.harvest.backend,
        "folder": str(folder),
        "samples": found.samples,
        "reused": len(done.intersection(mine)),
        "tokens": sum(s.tokens for s in shards),
        "bytes": sum(s.bytes for s in shards),
        "set_aside": dict(Counter(row["reason"] for row in aside)),
    }
    show(summary, aside)
    if exceeds(len(aside), len(mine), cfg.harvest.max_reject_rate):
        raise ValueError(too_many(aside, len(mine), cfg.harvest.max_reject_rate))
    return summary


def features_folder(cfg: Config, identity: str, taps: Sequence[int] = ()) -> Path:
    """The cache folder of this target, these taps (default: the configured ones), this layout,
    this harvest.top_k.
    """
    key = cache_key(identity, list(taps or target_taps(cfg)), FEATURE_DTYPE, cfg.harvest.top_k)
    return cfg.path("features", key)


def published(cfg: Config, identity: str, folder: Path) -> set[str]:
    """Ids of the samples with features, after damaged ones were taken out, which it says, and
    shards of an interrupted harvest were adopted.
    """
    shape = (identity, list(target_taps(cfg)), target_config(cfg)["hidden_size"])
    mended = mend(folder, lambda path: open_shard(path, *shape, cfg.harvest.top_k))
    for name, fault in sorted(mended.damaged.items())[:SHOWN_DAMAGED]:
        console.print(f"features of sample {name}: {fault}; harvested again", markup=False)
    if mended.damaged or mended.lost:
        console.print(
            f"damaged features: {len(mended.damaged)} samples and {len(mended.lost)} whole files "
            f"of {folder}; harvested again",
            markup=False,
        )
    columns = features_columns(cfg.harvest.top_k)
    return set(read_dataset(folder, columns, columns=["sample_id"])["sample_id"].to_pylist())


def show(summary: Mapping[str, Any], aside: Sequence[Row]) -> None:
    """The table of what was made, and of what was set aside with an example of each reason."""
    names = ["samples", "reused", "tokens", "bytes"]
    columns = [*names, "set aside"]
    print_table("Features", columns, [[*(summary[name] for name in names), len(aside)]])
    if aside:
        examples = {row["reason"]: row for row in reversed(aside)}
        rows = [
            [reason, count, REASONS[reason][0], examples[reason]["sample_id"]]
            for reason, count in sorted(summary["set_aside"].items())
        ]
        print_table("Set aside", ["reason", "samples", "what was found", "for instance"], rows)


def _harvest(cfg: Config, rows: pa.Table, folder: Path) -> Harvested:
    size, found = cfg.harvest.samples_per_shard, Harvested()
    chunks = [rows.slice(i, size) for i in range(0, rows.num_rows, size)]
    with tqdm(total=rows.num_rows, desc="harvest", unit="sample", disable=not chunks) as bar:
        for done in by_actors(cfg, folder, chunks) if chunks else ():
            found.paths += done.paths
            found.samples += done.samples
            found.aside += done.aside
            bar.update(done.samples + len(done.aside))
    return found


def by_actors(cfg: Config, folder: Path, chunks: Sequence[pa.Table]) -> Iterator[Harvested]:
    """The work of each chunk, in the order in which it is done, by Ray actors."""
    with cluster(cfg):
        num_actors, share = min(cfg.harvest.workers, len(chunks)), actor_share(cfg, ray.nodes())
        note_waiting(share, num_actors)
        remote = ray.remote(Harvester).options(**share)
        actors = [remote.remote(cfg, max(1, int(share["num_cpus"]))) for _ in range(num_actors)]
        pool: Any = ray.util.ActorPool(actors)
        # A chunk becomes Python lists when an actor is free for it.
        yield from pool.map_unordered(
            lambda actor, chunk: actor.shard.remote(folder, chunk.to_pylist()), chunks
        )


def actor_share(cfg: Config, nodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """CPUs and GPUs that each actor gets, such that all fit on the nodes of the cluster.

    Raises ValueError for more harvest.workers than CPUs, or than GPUs where they are used.
    """
    workers = cfg.harvest.workers
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    cpus = [int(found.get("CPU", 0)) for found in resources]
    gpus = sum(int(found.get("GPU", 0)) for found in resources)
    if sum(cpus) < workers:
        raise ValueError(
            f"harvest.workers={workers}, but Ray has {sum(cpus)} CPUs: lower it, or raise "
            "ray.num_cpus (or the container's limit)"
        )
    use_gpus = cfg.target.device != "cpu" and (gpus > 0 or cfg.target.device == "cuda")
    if use_gpus and gpus < workers:
        raise ValueError(
            f"harvest.workers={workers}, but Ray has {gpus} GPUs, one for each: lower it, or set "
            "target.device=cpu"
        )
    threads = cpus_each(nodes, workers)
    if not cfg.ray.address:  # this machine: what torch was told (OMP_NUM_THREADS) holds
        threads = min(threads, torch.get_num_threads())
    return {"num_cpus": threads, "num_gpus": int(use_gpus)}


def note_waiting(share: Mapping[str, float], num_actors: int) -> None:
    """Say so where others hold what the actors need: a bar at 0 explains nothing."""
    free = ray.available_resources()
    for name, each in (("CPU", share["num_cpus"]), ("GPU", share["num_gpus"])):
        if free.get(name, 0.0) < each * num_actors:
            console.print(
                f"harvest needs {each * num_actors:g} {name}s and Ray has {free.get(name, 0.0):g} "
                "free: it waits for other jobs of the cluster to end"
            )


class Harvester:
    """One target engine; writes whole shards. An actor is one in a process of its own."""

    def __init__(self, cfg: Config, threads: int):
        torch.set_num_threads(threads)
        self.cfg, self.taps = cfg, target_taps(cfg)
        self.identity = target_id(cfg.target_path)
        self.backend, self.head = make_backend(cfg)

    def shard(self, folder: Path, rows: list[Row]) -> Harvested:
        """Harvest `rows` into one shard of `folder`; without one if all of them are set aside."""
        top_k, made = self.cfg.harvest.top_k, {}
        done = Harvested()
        for batch in _batches(rows, self.cfg.harvest.batch_tokens):
            ids = [[*row["prompt_ids"], *row["output_ids"]] for row in batch]
            for row, features in zip(batch, self.backend.features(ids, self.taps), strict=True):
                fault = screen(row, features, self.head)
                if fault:
                    done.aside.append(aside_row(row, self.identity, folder.name, fault))
                else:
                    made[row["sample_id"]] = feature_row(row, features, self.head, top_k)
        if made:
            hidden = target_config(self.cfg)["hidden_size"]
            schema = features_schema(self.identity, list(self.taps), hidden, top_k=top_k)
            kept = [made[row["sample_id"]] for row in rows if row["sample_id"] in made]
            path = folder / f"{short_hash([row['sample_id'] for row in rows])}.parquet"
            write_shard(path, pa.Table.from_pylist(kept, schema=schema))
            done.paths, done.samples = [path], len(kept)
        return done


def make_backend(cfg: Config) -> tuple[Backend, Tensor]:
    """The engine that `harvest.backend` names, loaded, and the target's head [V, H]."""
    if cfg.harvest.backend == "vllm":
        from serving.extract import Extractor

        dtype = served_dtype(cfg)
        head = load_borrowed(cfg.target_path, dtype)[1].to(compute_device(cfg))
        return Extractor(cfg.target_path, target_taps(cfg), dtype), head
    target: Target = load_target(cfg.target_path, compute_dtype(cfg), compute_device(cfg))
    return target, target.head


def feature_row(row: Row, features: Features, head: Tensor, top_k: int = 0) -> Row:
    """The FEATURES row of a sample, with TOP for top_k > 0."""
    ids = [*row["prompt_ids"], *row["output_ids"]]
    found = features_row(row["sample_id"], ids, features.taps.to(torch.bfloat16))
    if top_k:
        first = len(row["prompt_ids"])
        last = features.last[first - 1 : len(ids) - 1].to(head.device, head.dtype)
        top_ids, logprobs = top_logprobs(last, head, top_k)
        found |= top_row(found, top_ids.numpy(), logprobs.numpy())
    return found


def aside_row(row: Row, identity: str, key: str, fault: Fault) -> Row:
    """The SET_ASIDE row of a sample that failed a check under this features key."""
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
