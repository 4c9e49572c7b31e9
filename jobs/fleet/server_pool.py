"""The servers that one measurement needs, as many at a time as the memory holds."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from jobs.base.config import Config
from jobs.base.devices import served_dtype
from jobs.fleet.replica import server
from serving.server_memory import GIB, free_bytes, gpu_share, server_bytes
from serving.vllm_server import Server, vllm_runs_on_cpu

Drafts = tuple[int, ...]
"""K by batch size, as serving.vllm_server.Server has it; (): no drafter."""
MOST = 3
"""Servers that are of use at the same time: without a drafter, at the largest K, at another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How many servers fit at once, and the numbers behind it in words."""

    servers: int
    words: str


def room(cfg: Config, drafter: Path | None) -> Room:
    """How many servers of this target, with this drafter or none, fit into what is free now."""
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
    """What `verify` will do with it, in words."""
    if found.servers >= most:
        return f"verify runs {most} servers side by side"
    if found.servers == 0:
        return "no vLLM server fits: verify and preflight refuse to start"
    pace = "one after the other" if found.servers == 1 else f"{found.servers} at a time"
    return f"verify runs its servers {pace}, which takes longer"


def require(cfg: Config, drafter: Path | None, needed: int, stage: str) -> Room:
    """Room for at least `needed` servers at once. ValueError with the numbers if there is less."""
    found = room(cfg, drafter)
    if found.servers < needed:
        raise ValueError(
            f"{stage} needs {needed} vLLM server(s) at once, there is room for {found.servers}: "
            f"{found.words}; stop other programs, or take less per server"
        )
    return found


class Servers:
    """Servers of the target with one drafter at several K, at most `most` at a time.

    `get` starts what does not run and stops what was not used for longest where there is no room.
    With room for all, starts overlap (`start`): they are mostly imports, and a server that waits
    for requests costs nothing but memory.
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
        """Begin to start the first of these that there is room for, without waiting."""
        for k in wanted:
            if k not in self.running and len(self.running) < self.most:
                self._start(k)

    def get(self, k: Drafts) -> Server:
        """The server with this K, answering."""
        if k not in self.running:
            while len(self.running) >= self.most:
                self._stop(next(iter(self.running)))
            self._start(k)
        one = self.running[k] = self.running.pop(k)
        one.wait_until_ready()
        return one

    def keep(self, needed: list[Drafts]) -> None:
        """Stop the others."""
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
    """The same server settings for both sides; only the drafter differs.

    No prefix cache: the passes repeat the same prompts, which a cache would answer without prefill,
    for a plain server more of it than for a drafting one. New prompts are what traffic brings.
    """
    args = [*cfg.serve.args, "--no-enable-prefix-caching"]
    return cfg.override("serve", port=0, drafter=str(drafter), k=k, capture="", args=args)
