"""The Ray actors of a harvest: how many, with how many CPUs and GPUs, and what they do."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import ray
import torch

from jobs.base.cluster import cluster, cpus_each
from jobs.base.config import Config
from jobs.base.console import console
from jobs.harvesting.harvester import Harvested, Harvester
from store.place import Place

WAITING = 2
"""Chunks that an actor has: one that it works on, and the next."""


def by_actors(
    cfg: Config, place: Place, chunks: Iterator[pa.Table], num_chunks: int
) -> Iterator[Harvested]:
    """Harvest chunks with Ray actors; yields what each came to, in the order they finish. Chunks
    are taken when an actor has room for them: that bounds what is in memory.
    """
    with cluster(cfg):
        num_actors, share = min(cfg.harvest.workers, num_chunks), actor_share(cfg, ray.nodes())
        note_waiting(share, num_actors)
        remote = ray.remote(Harvester).options(**share)
        actors = [remote.remote(cfg, max(1, int(share["num_cpus"]))) for _ in range(num_actors)]
        free, running = actors * WAITING, {}
        for chunk in chunks:
            if not free:
                yield _finished(running, free)
            actor: Any = free.pop(0)
            running[actor.shard.remote(place, chunk)] = actor
        while running:
            yield _finished(running, free)


def _finished(running: dict[Any, Any], free: list[Any]) -> Harvested:
    """The result of the chunk that ends next; its actor is free for another."""
    [done], _ = ray.wait(list(running), num_returns=1)
    free.append(running.pop(done))
    return ray.get(done)


def actor_share(cfg: Config, nodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """CPUs and GPUs that each actor gets, such that all fit on the nodes of the cluster.

    Raises ValueError for more harvest.workers than CPUs or, if GPUs are used, than GPUs. Raises it
    also if the nodes do not have a GPU and a CPU together for each worker.
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
    threads = cpus_each(nodes, workers, int(use_gpus))
    if not threads:  # enough in sum, but not on the same nodes: Ray would wait silently
        raise ValueError(
            f"harvest.workers={workers}, but the nodes of Ray cannot give each a GPU and a CPU "
            f"({gpus} GPUs are on nodes with too few CPUs): lower it, or start those nodes with "
            "more CPUs (ray start --num-cpus)"
        )
    if not cfg.ray.address:  # on this machine a limit given to torch (OMP_NUM_THREADS) applies
        threads = min(threads, torch.get_num_threads())
    return {"num_cpus": threads, "num_gpus": int(use_gpus)}


def note_waiting(share: Mapping[str, float], num_actors: int) -> None:
    """Say so if other jobs hold what the actors need; the progress bar would just stay at 0."""
    free = ray.available_resources()
    for name, each in (("CPU", share["num_cpus"]), ("GPU", share["num_gpus"])):
        if free.get(name, 0.0) < each * num_actors:
            console.print(
                f"harvest needs {each * num_actors:g} {name}s and Ray has {free.get(name, 0.0):g} "
                "free: it waits for other jobs of the cluster to end"
            )
