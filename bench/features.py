"""make bench-features: the feature cache against one file per sample: size, writing, reading.

The data are real: the demo's target reads conversations made of the demo's prompts, 100 to 600
tokens each. Four sides store the same features:

    bf16 planes   shards of the feature cache, exact, read as training reads them (FeatureCache)
    fp8           the same with harvest.features=fp8
    safetensors   a file per sample, read by `load_file`, which maps it into memory
    torch.save    a file per sample, read by `torch.load(weights_only=True)`, mapped or not: the
                  faster one counts

Sides take turns, files are in the page cache. All bytes of a result are summed, so that a mapped
file is really read. MB are those of raw bf16, seconds those of the CPU, of all threads together: so
other load on the machine hardly matters. Our sides check digests of ids and bytes, and finiteness,
of every row. Their writing includes a SHA-256 and an fsync. The others do none of it.
`detail.shuffled` reads in random order with an empty cache, as a first epoch that does not fit into
memory: a row group is read for each sample of it. `cold_mb_s` is wall time with no byte in the page
cache: the disk decides. `detail.parts` says what our reading spends its
time on. `ratio` is the speed of reading bf16 planes over that of the faster of safetensors and
torch.save.

    ARGS="--at s3://BUCKET/PREFIX"   also from a bucket: two threads read ahead on every side; wall
                                     time, in `detail.bucket`
    ARGS="--tau work=FOLDER"         instead: the tau that fp8 costs, on the traffic of a finished
                                     demo. `ratio` is tau trained on fp8 / on bf16, both replayed on
                                     bf16, which is what is served
"""

import argparse
import io
import os
import random
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from bench.harness import cpu_name, report
from dflash.acceptance import tau
from dflash.replay import replay
from dflash.target_model import load_target
from jobs import harvest, ingest, select, target, train
from jobs.base.cluster import cluster
from jobs.base.config import Config
from jobs.base.config import load as load_config
from jobs.base.console import print_table
from jobs.base.target_facts import target_config, target_taps
from jobs.dataset.samples import load_requests
from jobs.demo_data.prompts import prompts
from jobs.evaluation.drafters import drafter_on, load_on
from store.feature_cache import FeatureCache
from store.feature_codec import BFLOAT16, FLOAT8, decode, is_finite
from store.feature_shards import COLUMNS, dtype_of, open_shard, read_group, write_shard
from store.features import as_bytes, features_row, ids_digest
from store.place import Place, place_of
from store.schemas import FEATURE_INDEX, features_schema

ROWS, SHARD, TICKETS = 48, 12, (1, 2, 4)
"""Samples, samples in one of our shards, tickets in a conversation."""
AHEAD = 8
"""Samples that are read ahead, as many as a step of training takes."""
REPEATS = 9
STEPS, SEEDS = 100, (0, 1)
OURS, FP8, SAFETENSORS, TORCH = "bf16 planes", "fp8", "safetensors", "torch.save"
Sample = tuple[list[int], Tensor]
"""Token ids, and bf16 features [T, taps * hidden] of them."""


@dataclass(frozen=True)
class Side:
    """One way to store features. `write` puts all samples below a place; `read` gives those of
    these numbers. schema: of our shards.
    """

    write: Callable[[Place], None]
    read: Callable[[Place, list[int]], Iterator[Tensor]]
    schema: pa.Schema | None = None


def main() -> None:
    """Measure files, or with --tau drafters; print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tau", action="store_true")
    parser.add_argument("--at", default="", metavar="URL")
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    cfg = load_config(None, given.settings)
    if given.tau:
        return compare_tau(cfg, given.settings)
    target.run(cfg)
    samples = real_features(cfg)
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    with TemporaryDirectory(dir=cfg.path()) as folder:
        compare_files(make_sides(cfg, samples), samples, place_of(folder), given.at)


def real_features(cfg: Config) -> list[Sample]:
    """ROWS conversations of one to four tickets as the target reads them."""
    rng, asked = random.Random(0), iter(prompts("tickets", ROWS * max(TICKETS), 0))
    tokenizer = AutoTokenizer.from_pretrained(cfg.target_path, local_files_only=True)
    rows = []
    for _ in range(ROWS):
        first, *others = [next(asked) for _ in range(rng.choice(TICKETS))]
        turns = [*first.messages, *(turn for prompt in others for turn in prompt.messages[-2:])]
        rows.append(tokenizer.apply_chat_template(turns, return_dict=False))
    read, taps = load_target(cfg.target_path, torch.float32), target_taps(cfg)
    return [(ids, read.features([ids], taps)[0].taps.bfloat16()) for ids in rows]


def make_sides(cfg: Config, samples: list[Sample]) -> dict[str, Side]:
    """The sides by name."""
    shape = "bench", list(target_taps(cfg)), target_config(cfg)["hidden_size"]
    return {
        OURS: our_side(shape, samples, BFLOAT16),
        FP8: our_side(shape, samples, FLOAT8),
        SAFETENSORS: files_side(samples, save_file, load_file, load),
        TORCH: files_side(samples, torch.save, torch_load, torch_load),
        f"{TORCH}, mapped": files_side(samples, torch.save, torch_map, torch_load),
    }


def our_side(shape: tuple[str, list[int], int], samples: list[Sample], dtype: str) -> Side:
    """Shards of SHARD samples in a dtype of store.feature_codec, read with an empty cache."""
    schema, index = features_schema(*shape, dtype), FEATURE_INDEX.empty_table()
    digests = pa.array([ids_digest(ids) for ids, _ in samples])

    def write(place: Place) -> None:
        nonlocal index
        rows = [
            features_row(f"{i:04d}", ids, features, dtype, len(shape[1]))
            for i, (ids, features) in enumerate(samples)
        ]
        shards = (rows[i : i + SHARD] for i in range(0, len(rows), SHARD))
        index = pa.concat_tables([write_shard(place, schema, shard) for shard in shards])

    def read(place: Place, numbers: list[int]) -> Iterator[Tensor]:
        names = [f"{i:04d}" for i in numbers]
        cache = FeatureCache(place, index, *shape, digests, budget=0)
        for i in range(0, len(names), AHEAD):
            cache.prefetch(step := names[i : i + AHEAD])
            yield from (cache[name] for name in step)

    return Side(write, read, schema)


def files_side(
    samples: list[Sample],
    save: Callable[[dict[str, Tensor], Any], None],
    from_path: Callable[[Path], dict[str, Tensor]],
    from_bytes: Callable[[bytes], dict[str, Tensor]],
) -> Side:
    """A file per sample; from a bucket, two threads get them ahead."""

    def write(place: Place) -> None:
        place.path.mkdir(exist_ok=True)
        for i, (ids, features) in enumerate(samples):
            save({"hidden_states": features, "ids": torch.tensor(ids)}, place.path / f"{i:04d}")

    def read(place: Place, numbers: list[int]) -> Iterator[Tensor]:
        names = [f"{i:04d}" for i in numbers]
        if place.is_local:
            yield from (from_path(place.path / name)["hidden_states"] for name in names)
            return
        with ThreadPoolExecutor(2) as pool:
            for data in pool.map(place.read, names):
                yield from_bytes(data or b"")["hidden_states"]

    return Side(write, read)


def torch_load(source: Path | bytes) -> dict[str, Tensor]:
    """What torch.save wrote, read at once."""
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    return torch.load(file, weights_only=True)


def torch_map(path: Path) -> dict[str, Tensor]:
    """What torch.save wrote, mapped into memory."""
    return torch.load(path, weights_only=True, mmap=True)


def compare_files(sides: dict[str, Side], samples: list[Sample], place: Place, url: str) -> None:
    """Write all sides, check that they hold the same, time them, print the table and the line."""
    raw, tokens = sum(f.nbytes for _, f in samples), sum(len(ids) for ids, _ in samples)
    numbers, shuffled = list(range(len(samples))), random.Random(0).sample(range(ROWS), ROWS)
    writing = take_turns({n: lambda n=n: rewrite(sides[n], place / n) for n in sides}, 3)
    errors = {n: check(samples, sides[n].read(place / n, numbers)) for n in sides}
    assert all(error == 0 for name, error in errors.items() if name != FP8), errors

    def time_reading(order: list[int]) -> dict[str, list[float]]:
        turns = {n: lambda n=n: touch(sides[n].read(place / n, order)) for n in sides}
        return take_turns(turns, REPEATS)

    reading, random_reading = time_reading(numbers), time_reading(shuffled)
    cold = from_disk(sides, place, numbers, raw)
    sizes = {name: sum(found.size for found in (place / name).objects()) for name in sides}
    table = {
        name: {
            "bytes_per_token": round(sizes[name] / tokens, 1),
            "of_raw_bf16": round(sizes[name] / raw, 4),
            "read_mb_s": mb_s(raw, reading[name]),
            "shuffled_mb_s": mb_s(raw, random_reading[name]),
            "cold_mb_s": cold[name],
            "write_mb_s": mb_s(raw, writing[name]),
            "error": errors[name],
        }
        for name in sides
    }
    columns = list(table[OURS])
    rows = [[name, *(row[c] for c in columns)] for name, row in table.items()]
    print_table(f"Features of {tokens} tokens", ["", *columns], rows)
    detail: dict[str, Any] = {"cpu": cpu_name(), "samples": len(samples), "tokens": tokens}
    detail |= {"raw_bytes_per_token": raw // tokens, "sides": table}
    detail["shuffled"] = round(statistics.median(ratios_of(random_reading)), 3)
    detail["parts"] = {n: parts(place / n, side.schema) for n, side in sides.items() if side.schema}
    if url:
        detail["bucket"] = from_bucket(sides, place, place_of(url), numbers, raw)
    unit = "MB/s read bf16 planes / the faster of the files per row"
    report("features", ratios_of(reading), unit, detail)


def rewrite(side: Side, place: Place) -> None:
    """Write all samples of a side into an empty folder."""
    place.delete_all()
    side.write(place)


def ratios_of(seconds: dict[str, list[float]]) -> list[float]:
    """Of each turn: seconds of the fastest of the files per row / seconds of bf16 planes."""
    peers = [times for name, times in seconds.items() if name not in (OURS, FP8)]
    return [min(theirs) / ours for ours, *theirs in zip(seconds[OURS], *peers, strict=True)]


def mb_s(raw: int, seconds: list[float]) -> int:
    """The median speed."""
    return round(raw / 1e6 / statistics.median(seconds))


def take_turns(
    turns: Mapping[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.process_time,
    before: Callable[[str], object] = len,
) -> dict[str, list[float]]:
    """Seconds of each, `repeats` times, in A B C C B A order after a round that is not counted.
    `before` is called with the name of each, outside the time.
    """
    found: dict[str, list[float]] = {name: [] for name in turns}
    for i in range(repeats + 1):
        for name in sorted(turns, reverse=bool(i % 2)):
            before(name)
            started = clock()
            turns[name]()
            found[name].append(clock() - started)
    return {name: seconds[1:] for name, seconds in found.items()}


def touch(found: Iterable[Tensor]) -> int:
    """A sum over all bytes."""
    words = (features.view(torch.int16).numpy().view(np.uint64) for features in found)
    return sum(int(part.sum()) for part in words)


def check(samples: list[Sample], found: Iterator[Tensor]) -> float:
    """Relative error of what was read: 0 if it is bit for bit what was written."""
    error = total = 0.0
    for (_, expected), features in zip(samples, found, strict=True):
        error += float((features.double() - expected.double()).square().sum())
        total += float(expected.double().square().sum())
    return round((error / total) ** 0.5, 4)


def parts(place: Place, schema: pa.Schema) -> dict[str, float]:
    """Milliseconds of CPU time of each part of reading the shards at a place."""
    found: dict[str, list[float]] = {}
    dtype = dtype_of(schema)

    def timed(name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        started = time.process_time()
        result = work(*arguments)
        found.setdefault(name, []).append(time.process_time() - started)
        return result

    for name in [shard.name for shard in place.objects()] * REPEATS:
        footer = timed("footer", open_shard, place, name, schema)
        for group in range(footer.num_row_groups):
            for column in ("hi", "lo"):
                label = f"Parquet and zstd, column {column}"
                timed(label, read_group, place, name, footer, group, [column])
            rows = read_group(place, name, footer, group, COLUMNS)
            for i in range(len(rows)):
                hi, lo, n = as_bytes(rows["hi"][i]), as_bytes(rows["lo"][i]), rows["n_tokens"][i]
                timed("digests", zlib.crc32, lo, timed("digests", zlib.crc32, hi))
                timed("finite", is_finite, hi, lo, dtype)
                timed("to bf16", decode, hi, lo, n.as_py(), dtype)
    return {name: round(sum(seconds) / REPEATS * 1e3, 2) for name, seconds in found.items()}


def from_disk(sides: dict[str, Side], place: Place, numbers: list[int], raw: int) -> dict[str, int]:
    """MB/s of wall time of reading every side with none of its bytes in memory, as an epoch of more
    features than memory reads them.
    """
    os.sync()
    turns = {n: lambda n=n: touch(sides[n].read(place / n, numbers)) for n in sides}
    seconds = take_turns(turns, REPEATS, time.perf_counter, lambda name: forget(place / name))
    return {name: mb_s(raw, times) for name, times in seconds.items()}


def forget(place: Place) -> None:
    """Take the files of a place out of the page cache."""
    for found in place.objects():
        descriptor = os.open(place.path / found.name, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def from_bucket(
    sides: dict[str, Side], local: Place, place: Place, numbers: list[int], raw: int
) -> dict[str, int]:
    """MB/s of wall time of reading every side from a bucket. Credentials: AWS_* and the like."""
    for name in sides:
        (place / name).publish((local / name).path, last="")
    turns = {n: lambda n=n: touch(sides[n].read(place / n, numbers)) for n in sides}
    seconds = take_turns(turns, REPEATS, time.perf_counter)
    speeds = {name: mb_s(raw, times) for name, times in seconds.items()}
    print_table(f"From {place}", ["", "MB/s"], [[*row] for row in speeds.items()])
    return speeds


def compare_tau(demo: Config, given: list[str]) -> None:
    """Train on features of both dtypes with each seed; print tau of each and the JSON line."""
    shared = [f"target.path={demo.target_path}", f"ingest.logs={demo.path('capture')}"]
    shared += [f"train.steps={STEPS}", *given, f"work={demo.path('fp8')}"]
    configs = {
        name: load_config(None, [*shared, f"harvest.features={name}"]) for name in ("bf16", "fp8")
    }
    bytes_of, found = {}, {}
    with cluster(demo):
        ingest.run(configs["bf16"])
        select.run(configs["bf16"])
        for name, cfg in configs.items():
            bytes_of[name] = harvest.run(cfg)["bytes"]
        for seed in SEEDS:
            for name, cfg in configs.items():
                cfg = cfg.override("train", seed=seed, val_every=cfg.train.steps)
                folder = Path(train.run(cfg)["folder"])
                found[name, seed] = {read: score(configs[read], folder) for read in configs}
    rows = [[n, seed, *(taus[read] for read in configs)] for (n, seed), taus in found.items()]
    columns = ["trained on", "seed", *(f"replayed on {read}" for read in configs)]
    print_table("Tau on held-out conversations", columns, rows)
    ratios = [found["fp8", s]["bf16"] / found["bf16", s]["bf16"] for s in SEEDS]
    detail = {"cpu": cpu_name(), "steps": configs["bf16"].train.steps, "bytes": bytes_of}
    detail |= {"tau": {f"{name}, seed {seed}": taus for (name, seed), taus in found.items()}}
    report("features-tau", ratios, "served tau trained on fp8 / trained on bf16", detail)


def score(cfg: Config, folder: Path) -> float:
    """Pooled replayed tau of a drafter on held-out features as `cfg` stores them."""
    borrowed = load_on(cfg)
    drafter = drafter_on(folder, borrowed)
    _, requests = load_requests(cfg, cfg.evaluate.split)
    return round(tau(replay(drafter, *borrowed, requests, drafter.cfg.num_drafts)), 4)


if __name__ == "__main__":
    sys.exit(main())
