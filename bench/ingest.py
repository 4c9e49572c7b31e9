"""make bench-ingest [ARGS=FILE]: how fast text logs are ingested, against a bare parse of them.

Without FILE, a log of 128 MiB in the shape of the public ShareGPT file is made: an indented array
of conversations. Ours reads it as `flywheel ingest` does: its digest, its records, and the Parquet
shards of texts/. Theirs is one msgspec.json.decode of all bytes, the fastest parser that we keep.

`ratio` is seconds of the bare parse / seconds of ours; the goal is 0.5. `detail` has MB and rows a
second on one worker and on two (a half of the file each), and the most memory of a worker, beside
that of a process that only imports what it needs.
"""

import hashlib
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bench.harness import cpu_name, paired, report, seconds
from store.digests import digest_log
from store.log_formats import Rules
from store.log_states import SHARDED
from store.log_to_traffic import ingest_log
from store.place import Place
from store.tables import Table

MEGABYTES = 128
RULES = Rules("bench", 1000, "default", 2, 10, 10)
WORDS = ["the", "order", "from Porto", "was", "late", "it\n", "\u00e4", "'quoted'", "table.", "\\"]
MARK = b"\n  },\n  {"


def make(path: Path, size: int) -> None:
    """Write `size` bytes of conversations; the last one is cut."""
    rng = random.Random(0)
    text = " ".join(rng.choice(WORDS) for _ in range(1_000_000))
    left, number = size, 0
    with path.open("wb") as file:
        file.write(b"[\n")
        while left > 0:
            turns = [
                {
                    "from": ("human", "gpt")[i % 2],
                    "value": text[
                        (at := rng.randrange(5_000_000 // 2)) : at + rng.randrange(100, 1900)
                    ],
                }
                for i in range(8)
            ]
            one = json.dumps({"id": f"x{number}_0", "conversations": turns}, indent=2)
            data = (b",\n" * (number > 0) + b"  " + one.replace("\n", "\n  ").encode())[:left]
            file.write(data)
            left, number = left - len(data), number + 1


def halves(path: Path, folder: Path) -> list[Path]:
    """The file as two, divided between two elements."""
    data = path.read_bytes()
    at = data.index(MARK, len(data) // 2)
    parts = [data[: at + 4] + b"\n]", b"[\n  {" + data[at + len(MARK) :]]
    paths = [folder / "half0", folder / "half1"]
    for part, half in zip(parts, paths, strict=True):
        half.write_bytes(part)
    return paths


def ingest(path: Path) -> tuple[int, float]:
    """(rows, most memory of this process in MiB) of one log into tables of a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        size, sha256, _ = digest_log(str(path), set())
        traffic, rejects, acceptance, texts = (
            Table(Place(f"{folder}/{name}"), schema) for name, schema in SHARDED.items()
        )
        places = traffic, rejects, acceptance, texts, Place(f"{folder}/marks")
        state = ingest_log(str(path), size, sha256, RULES, *places)
    return state.counts["accepted"], memory()


def memory() -> float:
    """Most memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        1 if sys.platform == "darwin" else 1024
    )


def idle(_: Any) -> float:
    """What a worker needs that reads nothing."""
    return memory()


def bare(path: Path) -> None:
    """The parse alone. A file that is cut is parsed up to its end."""
    data = path.read_bytes()
    try:
        msgspec.json.decode(data)
    except msgspec.DecodeError:
        return


def main() -> None:
    """Compare and print the JSON line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = Path(sys.argv[1]) if sys.argv[1:] else folder / "log.json"
        if not sys.argv[1:]:
            make(path, MEGABYTES << 20)
        megabytes = path.stat().st_size / 1e6
        ratios = paired(lambda: ingest(path), lambda: bare(path), 5)
        detail: dict[str, Any] = {"cpu": cpu_name(), "cpus": os.cpu_count(), "MB": round(megabytes)}
        detail["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        spawn = multiprocessing.get_context("spawn")
        for workers, paths in ((1, [path]), (2, halves(path, folder))):
            with spawn.Pool(workers) as pool:
                least = max(pool.map(idle, range(workers), 1))
                found: list[tuple[int, float]] = []
                took = seconds(lambda p=pool, f=found, q=paths: f.extend(p.map(ingest, q, 1)))
            detail[f"{workers} workers"] = {
                "MB/s": round(megabytes / took),
                "rows/s": round(sum(rows for rows, _ in found) / took),
                "most_memory_mib": round(max(most for _, most in found)),
                "idle_memory_mib": round(least),
            }
    report("ingest", ratios, "s of a bare parse / s of ingest", detail)


if __name__ == "__main__":
    main()
