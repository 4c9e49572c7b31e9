"""make bench-sql [ARGS="rows=1000000 work=FOLDER"]: each question of sql/ over ten million rows.

A generator fills acceptance/ as a fleet does in a month: 8 replicas, 12 domains, three requests a
conversation, a new drafter every five days, K that falls with the load, and the evaluations of 30
drafters at every K. An answer has 41 rounds on average. The other tables have some hundred rows.
Each question is then asked three times on two cores, after one time that is not counted. Before,
the summaries are made that they read (jobs/dataset/shard_sums.py); `detail` has how long that took,
and the peak of memory. With `work` the rows are kept, and found again by the next run.

`ratio` is 2 s over the median of the slowest question; it must be at least 1, and `memory_gib` at
most 4. `cpu_seconds` is what the same repeats cost on both cores together: on a machine that is
busy with other things it says more than the time.
"""

import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context

import numpy as np
import pyarrow as pa

from bench.harness import cpu_name, report, seconds
from jobs.base.config import Config, load
from jobs.base.console import console, print_table
from jobs.dataset.queries import Question, ask_question, opened, questions
from store.schemas import ACCEPTANCE
from store.table_shards import Shard
from tests.helpers.store import NEW, TARGET, fill

CORES, LIMIT_S, LIMIT_GIB, REPEATS = 2, 2.0, 4.0, 3
SHARD_ROWS, SAMPLES = 50_000, 7_000
K, DRAFTERS, SERVED, REPLICAS, DAYS = 7, 30, 6, 8, 30
DOMAINS = [f"domain-{i}" for i in range(12)]
START = int(datetime(2026, 2, 1, tzinfo=UTC).timestamp())
GIVEN = {
    "lineage": {"drafter": NEW[:12]},
    "savings": {"price_per_hour": "98"},
    "worst_prompts": {"drafter": "drafter-0029"},
}
"""Parameters that have no default."""


def main() -> None:
    """Generate, ask, and print the JSON line."""
    settings = dict(word.split("=") for word in sys.argv[1:])
    rows = int(settings.get("rows", 10_000_000))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    with tempfile.TemporaryDirectory() as folder:
        cfg = load(None, [f"work={settings.get('work', f'{folder}/work')}"])
        console.print(f"generating {rows} rows of acceptance")
        generating = (
            0.0 if cfg.table("acceptance").version() else seconds(lambda: generate(cfg, rows))
        )
        first = seconds(lambda: opened(cfg).__enter__())
        found = {question.name: times_of(cfg, question) for question in questions()}
    times = {name: wall for name, (wall, _) in found.items()}
    cpu = {name: statistics.median(spent) for name, (_, spent) in found.items()}
    medians = {name: statistics.median(found) for name, found in times.items()}
    slowest = max(medians, key=lambda name: medians[name])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    by_time = sorted(medians, key=lambda name: -medians[name])
    lines = [[name, medians[name], cpu[name]] for name in by_time]
    print_table("Seconds", ["question", "median", "of CPU"], lines)
    detail = {
        "rows": rows,
        "slowest": slowest,
        "seconds": {name: round(found, 3) for name, found in medians.items()},
        "cpu_seconds": {name: round(found, 3) for name, found in cpu.items()},
        "memory_gib": round(memory, 2),
        "memory_ok": memory <= LIMIT_GIB,
        "summaries_s": round(first, 1),
        "generating_s": round(generating, 1),
        "cores": CORES,
        "cpu": cpu_name(),
    }
    report("sql", [LIMIT_S / t for t in times[slowest]], "2 s / s of the slowest question", detail)


def times_of(cfg: Config, question: Question) -> tuple[list[float], list[float]]:
    """Seconds of each repeat of a question, and of CPU."""
    console.print(question.name)
    asked = partial(ask_question, cfg, question, GIVEN.get(question.name, {}))
    assert asked().num_rows, f"{question.name} has no answer"
    wall, cpu = [], []
    for _ in range(REPEATS):
        before = time.process_time()
        wall.append(seconds(asked))
        cpu.append(time.process_time() - before)
    return wall, cpu


def generate(cfg: Config, rows: int) -> None:
    """Fill every table, acceptance/ with at least `rows` rows."""
    fill(cfg)
    drafters = max(1, round(DRAFTERS * rows / 10_000_000))
    shards = -(-(rows - drafters * SAMPLES * K) // SHARD_ROWS)
    with ProcessPoolExecutor(CORES, get_context("spawn")) as pool:
        measured = pool.map(partial(evaluation, cfg), range(DRAFTERS - drafters, DRAFTERS))
        served = pool.map(partial(production, cfg, shards), range(shards))
        found: Sequence[Shard] = [*measured, *served]
    cfg.table("acceptance").change(lambda live: (found, []))


def evaluation(cfg: Config, number: int) -> Shard:
    """The replay of drafter `number` on the same samples at every K."""
    rng = np.random.default_rng(number)
    n = SAMPLES * K
    sample = np.tile(np.arange(SAMPLES), K)
    ks = np.repeat(np.arange(1, K + 1), SAMPLES)
    domain = sample // 3 % len(DOMAINS)
    columns = {
        "sample_id": names("sample", sample),
        "conversation_id": names("conversation", sample // 3),
        "request_id": names("replay-sample", sample),
        "origin": pa.array(["replay"] * n),
        "drafter_version": pa.array([f"drafter-{number:04}"] * n),
        "domain": pa.array(np.array(DOMAINS)[domain]),
        "k": pa.array(ks),
        "prompt_tokens": pa.array(20 + sample % 3000),
        "replica": pa.array([""] * n),
        **times(np.full(n, START + number)),
    }
    chance = 0.55 + 0.005 * number + 0.02 * domain
    return write(cfg, columns, rng, chance, ks)


def production(cfg: Config, shards: int, number: int) -> Shard:
    """Log `number` of `shards`: some hours of one replica."""
    rng = np.random.default_rng(1000 + number)
    replica, part = number % REPLICAS, number // REPLICAS
    hours = DAYS * 24 * REPLICAS / shards
    ended = START + 3600 * hours * (part + np.sort(rng.random(SHARD_ROWS)))
    drafter = min(SERVED - 1, int(part * hours / (DAYS * 24 / SERVED))) + DRAFTERS - SERVED
    busy = np.sin(ended / 86400 * 2 * np.pi) > 0.3
    text = [f"drafter-{drafter:04}"] * SHARD_ROWS
    conversation = rng.integers(0, SHARD_ROWS // 3, SHARD_ROWS)
    domains = np.minimum(rng.geometric(0.25, SHARD_ROWS // 3) - 1, len(DOMAINS) - 1)
    domain = domains[conversation]
    columns = {
        "sample_id": names(f"s{number}", np.arange(SHARD_ROWS)),
        "conversation_id": names(f"c{number}", conversation),
        "request_id": names(f"r{number}", np.arange(SHARD_ROWS)),
        "origin": pa.array(["served"] * SHARD_ROWS),
        "drafter_version": pa.array(text),
        "version": pa.array([str(drafter)] * SHARD_ROWS),
        "domain": pa.array(np.array(DOMAINS)[domain]),
        "k": pa.array(np.full(SHARD_ROWS, K)),
        "prompt_tokens": pa.array(rng.integers(20, 4000, SHARD_ROWS)),
        "replica": pa.array([f"replica-{replica}"] * SHARD_ROWS),
        "log": pa.array([f"log-{number}"] * SHARD_ROWS),
        "concurrency": pa.array(np.where(busy, 24, 4)),
        **times(ended),
    }
    chance = 0.5 + 0.01 * (drafter - DRAFTERS) + 0.02 * domain
    return write(cfg, columns, rng, chance, np.where(busy, 3, K))


def names(prefix: str, numbers: np.ndarray) -> pa.Array:
    """Names as long as those of samples."""
    return pa.array([f"{prefix}-{number:032x}"[-32:] for number in numbers.tolist()])


def times(ended: np.ndarray) -> dict[str, pa.Array]:
    """Columns of times, from seconds."""
    micros = pa.array((ended * 1e6).astype(np.int64))
    return {name: micros.cast(pa.timestamp("us", "UTC")) for name in ("started_at", "finished_at")}


def write(
    cfg: Config,
    columns: dict[str, pa.Array],
    rng: np.random.Generator,
    chance: np.ndarray,
    drafted: np.ndarray,
) -> Shard:
    """Write requests as a shard. chance: that a draft is accepted, by request."""
    n = len(chance)
    rounds = np.clip(rng.lognormal(3.4, 0.8, n), 1, 800).astype(np.int32)
    offered = np.repeat(drafted, rounds)
    # How many of a row of drafts are accepted is geometric.
    hits = np.log(rng.random(len(offered))) / np.repeat(np.log(chance), rounds)
    accepted = np.minimum(hits.astype(np.int64), offered)
    ends = np.append(0, np.cumsum(rounds)).astype(np.int32)
    lists = {"accepted": accepted, "drafted": offered}
    made = np.add.reduceat(accepted, ends[:-1]) + rounds
    known = columns | {
        "target_id": pa.array([TARGET] * n),
        "temperature": pa.array(np.zeros(n)),
        "output_tokens": pa.array(made + 1),
        "repeat_count": pa.array(np.ones(n, np.int64)),
        "batch": pa.array(["batch"] * n),
        **{
            name: pa.ListArray.from_arrays(pa.array(ends), pa.array(values.astype(np.int16)))
            for name, values in lists.items()
        },
    }
    rows = [
        known[f.name].cast(f.type) if f.name in known else pa.nulls(n, f.type) for f in ACCEPTANCE
    ]
    return cfg.table("acceptance").write(pa.Table.from_arrays(rows, schema=ACCEPTANCE))


if __name__ == "__main__":
    main()
