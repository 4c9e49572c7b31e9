"""What each worker of a stage gets of a Ray cluster, from what each of its nodes has. Workers that
can never be placed are refused: Ray would wait for ever.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jobs.base.config import Config


@dataclass(frozen=True, slots=True)
class Node:
    """CPUs and GPUs of a node, all that it has or what is free of them."""

    cpus: int
    gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Workers of a stage: the setting `workers` of its section, each with `cpus` (0: as many as
    fit) and `gpus`. `cpu_setting` makes it compute without GPUs.
    """

    stage: str
    workers: int
    cpus: int
    gpus: float
    cpu_setting: str


def cluster_nodes() -> tuple[list[Node], list[Node]]:
    """The live nodes of the cluster: all that each has, and what is free of it now."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    free = available_resources_per_node()
    pairs = [(node["Resources"], free.get(node["NodeID"], {})) for node in alive]
    whole, unused = (
        [Node(int(part.get("CPU", 0)), part.get("GPU", 0.0)) for part in column]
        for column in zip(*pairs, strict=True)
    )
    return whole, unused


def at_the_driver() -> dict[str, Any]:
    """Options of a task that reads files of this machine. It asks for a CPU only if one is free:
    this command may have the last one of its node, and would wait for itself.
    """
    here = ray.get_runtime_context().get_node_id()
    free = available_resources_per_node().get(here, {}).get("CPU", 0)
    return {
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
        "num_cpus": min(1, int(free)),
    }


def placed(cfg: Config, wanted: Wanted, whole: Sequence[Node], free: Sequence[Node]) -> int:
    """CPUs for each of the wanted workers, such that they and their GPUs fit on these nodes at the
    same time: `wanted.cpus`, or the most that fit.

    On a cluster of others they fit into what is free, if they can: `ray job submit` gives a CPU to
    the command itself. Raises ValueError if they do not fit into the whole nodes either.
    """
    if not cpus_each(wanted, whole):
        raise ValueError(refusal(cfg, wanted, whole))
    if not cfg.ray.address:
        return cpus_each(wanted, whole)
    # They wait for others then. One CPU of each node may be this command's own.
    rest = [replace(node, cpus=max(1, node.cpus - 1)) for node in whole if node.cpus]
    return cpus_each(wanted, free) or cpus_each(wanted, rest) or cpus_each(wanted, whole)


def cpus_each(wanted: Wanted, nodes: Sequence[Node]) -> int:
    """CPUs that each of the wanted workers can have, all at the same time; 0 if they do not fit.

    Example: four nodes of 4 CPUs give two workers 4, not 8.
    """
    most = max((node.cpus for node in nodes), default=0)
    tried = [wanted.cpus] if wanted.cpus else range(most, 0, -1)
    return next((n for n in tried if places(nodes, n, wanted.gpus) >= wanted.workers), 0)


def places(nodes: Sequence[Node], cpus: int, gpus: float) -> int:
    """How many workers with so many CPUs and GPUs fit on these nodes. A worker is on one node, and
    a share of a GPU is of one GPU.
    """
    if not gpus:
        return sum(node.cpus // cpus for node in nodes)

    def on_gpus(node: Node) -> int:
        return int(node.gpus / gpus) if gpus >= 1 else int(node.gpus) * int(1 / gpus)

    return sum(min(node.cpus // cpus, on_gpus(node)) for node in nodes)


def refusal(cfg: Config, wanted: Wanted, nodes: Sequence[Node]) -> str:
    """What the nodes have, what was asked of them, and what to change."""
    asked = [f"{wanted.cpus or 1} CPUs"] + ([f"{wanted.gpus:g} GPUs"] if wanted.gpus else [])
    room = places(nodes, wanted.cpus or 1, wanted.gpus)
    fixes = [f"lower {wanted.stage}.workers"] if room else []
    fixes += [f"lower {wanted.stage}.cpus"] if wanted.cpus > 1 else []
    if wanted.gpus and places(nodes, wanted.cpus or 1, 0) >= wanted.workers:
        fixes.append(f"set {wanted.cpu_setting}=cpu")
    fixes.append("start more or larger nodes" if cfg.ray.address else "raise ray.num_cpus")
    return (
        f"{wanted.stage}.workers={wanted.workers} with {' and '.join(asked)} each do not fit: Ray "
        f"has {in_words(nodes)}, room for {room}. {fixes[0].capitalize()}"
        + "".join(f", or {fix}" for fix in fixes[1:])
    )


def in_words(nodes: Sequence[Node]) -> str:
    """Such as `2 nodes of 8 CPUs and 1 GPUs, 1 node of 64 CPUs`."""
    kinds = Counter(nodes)
    return ", ".join(
        f"{count} node{'s' * (count > 1)} of {node.cpus} CPUs"
        + (f" and {node.gpus:g} GPUs" if node.gpus else "")
        for node, count in kinds.most_common()
    )
