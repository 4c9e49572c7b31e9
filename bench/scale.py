"""Memory and time of the data path as traffic grows: ingest, select, the reading sides of harvest
and of training, SQL.

    make bench-scale                                  # 100 k, 500 k and 1 M requests of 300 tokens
    make bench-scale ARGS="--requests 20000 40000"    # quicker

Each stage runs as its own command on generated capture logs. While it runs, the memory of its
process and of every Ray process is sampled: what they hold themselves (anonymous memory), and the
peak of all resident pages, mapped files included.

`ratio` is the peak of resident memory of any stage's own process (the driver) with the most
requests over that with the fewest; at most 1.3 is wanted. `detail.growth` says how many times as
long each stage takes with the most requests as with half of them; at most 2.2 is wanted.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tqdm import tqdm

from bench.harness import cpu_name
from jobs.base.console import console, print_table
from tests.helpers.tiny import make_target

PROMPT, OUTPUT, PER_LOG = 200, 100, 20_000
EVERY = 0.2  # seconds between samples of memory
SELECTED = 2_000_000  # tokens: the budget that bounds harvest and training
SETTINGS = ["drafter.num_taps=3", "drafter.block_size=5", "drafter.mask_token_id=96"]
QUESTION = """
select domain, count(*) as samples, sum(prompt_tokens + output_tokens) as tokens,
    sum(repeat_count) as requests, count(distinct tenant) as tenants, max(captured_at) as newest
from traffic group by domain order by domain
"""


def main() -> None:
    """Measure each number of requests, smallest first; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[100_000, 500_000, 1_000_000])
    parser.add_argument("--folder", type=Path, help="keep logs and work folders here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = {n: measure(Path(folder), n) for n in sorted(args.requests)}
    show(found)
    most, fewest = max(found), min(found)
    half = min(found, key=lambda n: abs(n - most / 2))
    peaks = {n: max(stage["driver_peak"] for stage in found[n].values()) for n in found}
    grown = {
        name: round(
            found[most][name]["seconds"] / found[half][name]["seconds"] * 2 * half / most, 3
        )
        for name in found[most]
    }
    line = {
        "name": "scale",
        "ratio": round(peaks[most] / peaks[fewest], 3),
        "unit": f"peak driver memory at {most} requests / at {fewest}",
        "spread": [],
        "detail": {"growth": grown, "cpu": cpu_name(), "stages": found},
    }
    print(json.dumps(line))


def measure(folder: Path, requests: int) -> dict[str, dict[str, Any]]:
    """{stage: seconds, rates and peaks} for this many requests."""
    work = folder / str(requests)
    make_target(work / "target")
    size = generate(work / "capture", requests)
    (work / "question.sql").write_text(QUESTION)
    settings = [f"work={work}", *SETTINGS, f"select.tokens={SELECTED}"]
    found = {}
    for name, command in {
        "ingest": ["-m", "jobs.ingest", *settings],
        "ingest again": ["-m", "jobs.ingest", *settings],
        "select": ["-m", "jobs.select", *settings],
        "harvest reads": ["-m", "bench.scale_reading", "harvest", *settings],
        "training reads": ["-m", "bench.scale_reading", "training", *settings],
        "sql": ["-m", "jobs.sql", str(work / "question.sql"), *settings],
    }.items():
        console.print(f"{requests} requests: {name}")
        found[name] = run([sys.executable, *command], requests, size)
    shutil.rmtree(work)
    return found


def run(command: list[str], requests: int, size: int) -> dict[str, Any]:
    """Run a command to its end; seconds, rates and peaks of memory in bytes."""
    started = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        peaks = watch(process)
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{command} failed:\n{log.read().decode()[-3000:]}")
    seconds = time.perf_counter() - started
    return {
        "seconds": round(seconds, 2),
        "rows_per_second": round(requests / seconds),
        "mb_per_second": round(size / seconds / 1e6, 1),
        **peaks,
    }


def watch(process: subprocess.Popen) -> dict[str, Any]:
    """Peaks of memory until the process ends: of its resident pages, of what it holds itself, and
    of what each kind of Ray process holds.
    """
    driver_peak = driver_held = 0
    others: dict[str, int] = {}
    while process.poll() is None:
        for pid, name in processes(process.pid):
            memory = status(pid)
            if pid == process.pid:
                driver_peak = max(driver_peak, memory.get("VmHWM", 0))
                driver_held = max(driver_held, memory.get("RssAnon", 0))
            else:
                others[name] = max(others.get(name, 0), memory.get("RssAnon", 0))
        time.sleep(EVERY)
    return {"driver_peak": driver_peak, "driver_held": driver_held, "others_held": others}


def processes(pid: int) -> Iterator[tuple[int, str]]:
    """(process id, kind) of a process and all that it started."""
    yield pid, "driver"
    try:
        for child in psutil.Process(pid).children(recursive=True):
            words = child.cmdline() or [child.name()]
            yield child.pid, os.path.basename(words[0].split()[0])
    except psutil.NoSuchProcess:
        return


def status(pid: int) -> dict[str, int]:
    """Sizes in /proc/PID/status, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines if line.endswith(" kB"))
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in pairs}


def generate(folder: Path, requests: int) -> int:
    """Write capture logs of that many requests; returns their bytes."""
    folder.mkdir(parents=True)
    starts = range(0, requests, PER_LOG)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        jobs = [(folder, start, min(PER_LOG, requests - start)) for start in starts]
        return sum(
            tqdm(pool.map(write_log, *zip(*jobs, strict=True)), total=len(jobs), desc="logs")
        )


def write_log(folder: Path, start: int, count: int) -> int:
    """One log of `count` requests, the first of which has the number `start`; returns its bytes.

    Conversations of three turns, whose prompts continue one another; five domains, twenty tenants,
    one request in fifty a repeated one.
    """
    random = np.random.default_rng(start)
    path = folder / f"log-{start:09d}.jsonl"
    with open(path, "w") as log:
        for i in range(start, start + count):
            seed = i // 3 if i % 50 else 7
            prompt = np.random.default_rng(seed).integers(1, 90, PROMPT)[
                : PROMPT - 10 * (2 - i % 3)
            ]
            output = random.integers(1, 90, OUTPUT)
            day, second = divmod(i // 12, 86_400)
            log.write(
                f'{{"v":1,"captured_at":"2026-01-{1 + day:02d}T{second // 3600:02d}:'
                f'{second // 60 % 60:02d}:{second % 60:02d}Z","request_id":"r{i}","model":"m",'
                f'"prompt_ids":[{listed(prompt)}],"output_ids":[{listed(output)}],'
                f'"finish_reason":"stop","temperature":0,"conversation_id":"c{i // 3}",'
                f'"domain":"d{i % 5}","tenant":"t{i % 20}"}}\n'
            )
    return path.stat().st_size


def listed(ids: np.ndarray) -> str:
    """Token ids as the inside of a JSON list."""
    return ",".join(map(str, ids.tolist()))


def show(found: dict[int, dict[str, dict[str, Any]]]) -> None:
    """Print a row for each stage and number of requests."""
    rows = [
        [
            name,
            f"{requests:,}",
            stage["seconds"],
            f"{stage['rows_per_second']:,}",
            stage["mb_per_second"],
            f"{stage['driver_peak'] / 1e6:,.0f}",
            f"{stage['driver_held'] / 1e6:,.0f}",
            ", ".join(f"{kind} {held / 1e6:,.0f}" for kind, held in stage["others_held"].items()),
        ]
        for requests, stages in found.items()
        for name, stage in stages.items()
    ]
    columns = ["stage", "requests", "s", "rows/s", "MB/s", "driver peak MB", "held MB", "others MB"]
    print_table("Scale", columns, rows, most=None)


if __name__ == "__main__":
    main()
