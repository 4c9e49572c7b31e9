"""The servers that one measurement needs, as many at a time as fit into memory."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from jobs.base.config import Config
from jobs.base.devices import served_dtype
from jobs.servers.configured import server
from serving.server_memory import GIB, free_bytes, gpu_share, server_bytes
from serving.vllm_server import Server, vllm_runs_on_cpu

Drafts = tuple[int, ...]
"""K per batch size, as in serving.vllm_server.Server; (): no drafter."""
MOST = 3
"""The most servers that are useful at once: without a drafter, at the largest K, at another K."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How many servers fit at once, and a text with the numbers behind that."""

    servers: int
    words: str


def room(cfg: Config, drafter: Path | None) -> Room:
    """How many servers of this target, with this drafter or none, fit into the memory free now."""
    if not vllm_runs_on_cpu():
        free, total = torch.cuda.mem_get_info()
        share = gpu_share(cfg.serve.args)
        words = (
            f"each takes {share:.0%} of the GPU (--gpu-memory-utilization in serve.args), "
            f"{free / total:.0%} of it is free"
        )
        return Room(servers=int(free / total / share), words=words)
    folders = [cfg.target_path, *([drafter] if drafter else [])]
    each = server_bytes(folders, served_dtype(cfg).itemsize, cfg.serve.kv_cache_gib)
    free = free_bytes()
    words = (
        f"each takes about {each / GIB:.1f} GiB (KV cache {cfg.serve.kv_cache_gib} GiB: "
        f"serve.kv_cache_gib), {free / GIB:.1f} GiB are free"
    )
    return Room(servers=free // each, words=words)


def at_once(found: Room, most: int) -> str:
    """A text: how `verify` will run its `most` servers in this room."""
    if found.servers >= most:
        return f"verify runs {most} servers side by side"
    if found.servers == 0:
        return "no vLLM server fits: verify and preflight refuse to start"
    pace = "one after the other" if found.servers == 1 else f"{found.servers} at a time"
    return f"verify runs its servers {pace}, which takes longer"


def require(cfg: Config, drafter: Path | None, needed: int, stage: str) -> Room:
    """The room, if at least `needed` servers fit at once; else ValueError with the numbers."""
    found = room(cfg, drafter)
    if found.servers < needed:
        raise ValueError(
            f"{stage} needs {needed} vLLM server(s) at once, there is room for {found.servers}: "
            f"{found.words}; stop other programs, or lower what each server takes"
        )
    return found


class Servers:
    """Servers of the target with one drafter at several K, at most `most` at a time.

    `get` starts a server if it is not running; without room, the least recently used one is stopped
    first. `start` lets several start at once where there is room: starting is mostly imports, and
    a server that waits for requests costs only memory.
    """

    def __init__(self, cfg: Config, folder: Path, most: int):
        self.cfg, self.folder, self.most = cfg, folder, most
        self.running: dict[Drafts, Server] = {}  # the least recently used comes first
        self.exits = ExitStack()  # a server's exit stops it, and says so if it has died

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.exits.__exit__(kind, error, trace)  # pyright: ignore[reportArgumentType]

    def start(self, wanted: list[Drafts]) -> None:
        """Begin to start as many of these as there is room for, the first ones; does not wait."""
        for k in wanted:
            if k not in self.running and len(self.running) < self.most:
                self._start(k)

    def get(self, k: Drafts) -> Server:
        """The server with this K, ready for requests."""
        if k not in self.running:
            while len(self.running) >= self.most:
                self._stop(next(iter(self.running)))
            self._start(k)
        one = self.running[k] = self.running.pop(k)
        one.wait_until_ready()
        return one

    def keep(self, needed: list[Drafts]) -> None:
        """Stop all servers but these."""
        for k in [k for k in self.running if k not in needed]:
            self._stop(k)

    def _start(self, k: Drafts) -> None:
        name = "-".join(["verify", *(f"k{one}" for one in k)]) if k else "verify-plain"
        one = server(serving(self.cfg, self.folder if k else "", list(k)), f"{name}.log")
        self.exits.push(one)
        self.running[k] = one
        one.start()

    def _stop(self, k: Drafts) -> None:
        self.running.pop(k).stop()


def serving(cfg: Config, drafter: Path | str, k: list[int]) -> Config:
    """The server settings of a measurement: sides that are compared differ in the drafter only.

    No prefix cache: speed passes repeat their prompts, and a cache would spare the prefill, more of
    it for a plain server than for a drafting one. Real traffic brings new prompts.
    """
    args = [*cfg.serve.args, "--no-enable-prefix-caching"]
    return cfg.override("serve", port=0, drafter=str(drafter), k=k, capture="", args=args)
