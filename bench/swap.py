"""make bench-swap: how long a change of the drafter stops a server, in place and by a restart.

    python -m bench.swap work=runs/demo [evaluate.drafter=FOLDER]

A server under CLIENTS streams changes between the drafter and one that differs from it by noise on
its weights, REPEATS times. `ratio` is the seconds of a restart (stop, start, ready; of the same
server, without streams) over the seconds that the engine was paused. `detail` has what clients see:
the longest time between two parts of a stream, with and without a change, since requests in flight
are computed anew after it.
"""

import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import torch

from bench.harness import cpu_name, report
from dflash.checkpoint import drafter_sha256, load_drafter, save_drafter, stored_dtype
from dflash.identity import target_id
from jobs.base.config import load
from jobs.dataset.samples import load_rows
from jobs.evaluation.drafters import find_drafter
from jobs.servers.configured import server
from serving.replica_client import ReplicaClient
from serving.vllm_server import SERVED_NAME

CLIENTS, REPEATS = 8, 5


class Streams:
    """Clients that stream until the block ends; `gaps`: seconds between two parts, with times."""

    def __init__(self, url: str, prompts: list[list[int]]):
        self.url, self.prompts = url, prompts
        self.gaps: list[tuple[float, float]] = []
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self._run, args=(i,)) for i in range(CLIENTS)]

    def __enter__(self) -> "Streams":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join()

    def longest(self, start: float, end: float) -> float:
        """The longest gap that overlaps this time."""
        return max((gap for at, gap in self.gaps if at >= start and at - gap <= end), default=0.0)

    def _run(self, number: int) -> None:
        body = {"model": SERVED_NAME, "max_tokens": 128, "temperature": 0, "stream": True}
        with httpx.Client(base_url=self.url, timeout=None) as http:
            while not self.stopped.is_set():
                prompt = self.prompts[number % len(self.prompts)]
                number += CLIENTS
                asked = body | {"prompt": prompt, "ignore_eos": True}
                with http.stream("POST", "/v1/completions", json=asked) as answer:
                    last = 0.0
                    for _ in answer.iter_raw():
                        now = time.perf_counter()
                        if last:
                            self.gaps.append((now, now - last))
                        last = now


def with_noise(folder: Path, to: Path) -> Path:
    """A drafter of the same shape whose weights are a thousandth off."""
    drafter = load_drafter(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.mul_(1 + 1e-3 * torch.randn_like(weight))
    return save_drafter(drafter, to, stored_dtype(folder))


def main() -> None:
    """Measure and print the JSON line."""
    cfg = load(None, sys.argv[1:])
    folder = find_drafter(cfg, cfg.evaluate.drafter)
    rows = load_rows(cfg, cfg.evaluate.split)
    prompts = [row["prompt_ids"] for row in rows][:64]
    identity = target_id(cfg.target_path)
    with tempfile.TemporaryDirectory() as scratch:
        noisy = with_noise(folder, Path(scratch, "noisy"))
        token = Path(scratch, "token")
        token.write_text("a-token-of-a-benchmark\n")
        settings: dict[str, Any] = {"port": 0, "drafter": str(folder), "token_file": str(token)}
        made = server(cfg.override("serve", **settings), "bench-swap.log")
        restarts, pauses, seen, quiet = [], [], [], []
        for _ in range(2):
            started = time.perf_counter()
            with made as running:
                running.wait_until_ready()
                restarts.append(time.perf_counter() - started)
                if len(restarts) == 2:
                    with Streams(running.url, prompts) as streams:
                        time.sleep(10)
                        client = ReplicaClient(running.url, token.read_text().strip())
                        for number in range(REPEATS):
                            wanted = noisy if number % 2 == 0 else folder
                            sha256 = drafter_sha256(wanted)
                            client.deliver(wanted, str(number), sha256, identity)
                            start = time.perf_counter()
                            pauses.append(client.activate(sha256)["pause_seconds"])
                            end = time.perf_counter()
                            time.sleep(8)
                            seen.append(streams.longest(start, end))
                            quiet.append(streams.longest(end + 4, end + 8))
    restart = statistics.median(restarts)
    detail = {"cpu": cpu_name(), "restart_seconds": restarts, "pause_seconds": pauses}
    detail |= {"longest_gap_at_a_change": seen, "longest_gap_otherwise": quiet}
    report("swap", [restart / pause for pause in pauses], "s restart / s pause", detail)


if __name__ == "__main__":
    main()
