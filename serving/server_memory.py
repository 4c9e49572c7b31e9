"""How much memory is free, and how much a server takes. This decides how many run side by side."""

import json
import os
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import psutil

GIB = 2**30
OVERHEAD = GIB
"""Bytes of one vLLM on a CPU beside weights and KV cache: imports, kernels, buffers."""
COPIES = 2
"""A linear layer's CPU kernel reads a packed copy of its weight; the original stays."""
GPU_SHARE = 0.92
"""Share of a GPU's memory that vLLM takes by default."""
CGROUPS = Path("/sys/fs/cgroup")


def free_bytes(cgroups: Path = CGROUPS, me: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that this process and its children can still take: what is free on the machine, or less
    if a container (cgroup v1 or v2) has a limit. Page cache that can be dropped counts as free.
    """
    return min([psutil.virtual_memory().available, *_left_in_groups(cgroups, me)])


def _left_in_groups(cgroups: Path, me: Path) -> Iterator[int]:
    """Bytes left in each memory cgroup around this process that has a limit."""
    lines = me.read_text().splitlines() if me.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage, cache = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, cache = cgroups / "memory", "total_inactive_file"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inside = root / path.strip("/")
        # Inside a container its own group is mounted as the root, whatever its path says.
        for group in dict.fromkeys([inside, *inside.parents, root]):
            if not group.is_relative_to(root) or not (group / limit).is_file():
                continue
            most = (group / limit).read_text().strip()
            if most != "max":
                used = int((group / usage).read_text())
                yield max(0, int(most) - used + _stat(group / "memory.stat", cache))


def _stat(path: Path, name: str) -> int:
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


def weight_bytes(folder: str | os.PathLike, bytes_each: int) -> int:
    """Bytes of a folder's *.safetensors if every number takes `bytes_each`; reads headers only.

    This is an upper estimate: a stored copy of a tied embedding is counted, too. Raises ValueError
    for a damaged file.
    """
    return bytes_each * sum(
        prod(tensor["shape"])
        for path in Path(folder).glob("*.safetensors")
        for name, tensor in _header(path).items()
        if name != "__metadata__"
    )


def _header(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            if length > size:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
            if not isinstance(header, dict):
                raise ValueError("its header is not a JSON object")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}: damaged, no safetensors file ({error}); copy it again"
            ) from error
    return header


def server_bytes(folders: Sequence[str | os.PathLike], bytes_each: int, kv_cache_gib: int) -> int:
    """Bytes that one vLLM takes on a CPU with the weights in these folders (target, drafter)."""
    weights = sum(weight_bytes(folder, bytes_each) for folder in folders)
    return COPIES * weights + kv_cache_gib * GIB + OVERHEAD


def gpu_share(args: Sequence[str]) -> float:
    """The share of a GPU that a server with these vLLM arguments takes."""
    for i, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name == "--gpu-memory-utilization":
            return float(value if equals else args[i + 1])
    return GPU_SHARE
