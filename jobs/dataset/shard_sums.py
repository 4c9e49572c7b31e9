"""What questions read of acceptance/ instead of its lists: two small files for each shard.

    <scratch>/summaries/<code>/<shard>-requests.parquet    a row per request, sums in place of lists
    <scratch>/summaries/<code>/<shard>-rounds.parquet      how many rounds drafted and accepted what

Reading the lists of ten million requests takes minutes (docs/decisions/045). A shard never changes,
since its name is the hash of its bytes, so what is summed up once stays true: each new shard is
read when a question first needs it. `code` is the hash of this file. Files of shards that are gone
are removed. All of this can be deleted at any time.
"""

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.base.config import Config
from jobs.base.console import console
from store.ids import short_hash
from store.schemas import ACCEPTANCE, TIMESTAMP
from store.tables import Table, told

CODE = short_hash(Path(__file__).read_text())
NUMBERS = pa.schema(
    [
        ("day", pa.date32()),  # in which it ended, in UTC
        ("series", pa.int64()),  # hash of SERIES: one number is grouped faster than six labels
        ("conversation", pa.int64()),  # hash of conversation_id
        ("conversation_group", pa.int16()),
        ("rounds", pa.int32()),
        ("tokens_in_rounds", pa.int32()),
        ("drafts", pa.int32()),  # in all rounds together
        ("most_drafted", pa.int16()),  # in one round
        ("sound", pa.bool_()),
        ("repeat_count", pa.int32()),
    ]
)
GROUPS = 128
"""Conversations are put into so many groups by hash; intervals come from how groups differ."""
BATCH = 100_000
SERIES = ["origin", "target_id", "drafter_version", "version", "k", "temperature"]
LABELS = [*SERIES, "domain", "replica"]
KEPT = ["request_id", "sample_id", "block_size", "prompt_tokens", "output_tokens", "started_at"]
KEPT += ["finished_at", "concurrency", "log"]
REQUESTS = pa.schema(
    [
        ("production", pa.bool_()),
        *(ACCEPTANCE.field(name) for name in (*LABELS, *KEPT)),
        *NUMBERS,
    ]
)
ROUNDS = pa.schema(
    [
        ("production", pa.bool_()),
        *(ACCEPTANCE.field(name) for name in LABELS),
        ("hour", TIMESTAMP),  # in which they ended
        ("drafted", pa.int16()),
        ("accepted", pa.int16()),
        ("last", pa.bool_()),  # the last round of their request
        ("rounds", pa.int64()),  # how many
    ]
)
SCHEMAS = {"requests": REQUESTS, "rounds": ROUNDS}
THREADS = 4
MANY = 20
"""New shards from which on the wait is announced."""


@dataclass(frozen=True)
class Lists:
    """A column of lists of numbers: its values one after the other, and the length of each list."""

    values: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> "Lists":
        """From Arrow; null is an empty list."""
        lengths = pc.list_value_length(column).fill_null(0)  # pyright: ignore[reportAttributeAccessIssue]
        values = np.asarray(pc.list_flatten(column)).astype(np.int64)  # pyright: ignore[reportAttributeAccessIssue]
        return cls(values, np.asarray(lengths))

    def sums(self) -> np.ndarray:
        """The sum of each list."""
        ends, totals = np.cumsum(self.lengths), np.append(0, np.cumsum(self.values))
        return totals[ends] - totals[ends - self.lengths]

    def largest(self) -> np.ndarray:
        """The largest value of each list; 0 of an empty one."""
        found, full = np.zeros(len(self.lengths), np.int64), self.lengths > 0
        if full.any():
            starts = np.cumsum(self.lengths) - self.lengths
            found[full] = np.maximum.reduceat(self.values, starts[full])
        return found


def summaries(cfg: Config, table: Table, version: int | None) -> dict[str, list[str]]:
    """{"requests": files, "rounds": files} of all shards of this version of acceptance/; makes
    those that are missing.
    """
    folder = cfg.path("summaries", CODE)
    names = sorted(table.shards(version))
    paths = {kind: [_file(folder, name, kind) for name in names] for kind in SCHEMAS}
    # The rounds are written last, so that they mean that both are there.
    missing = [
        name for name, path in zip(names, paths["rounds"], strict=True) if not path.is_file()
    ]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        if len(missing) >= MANY:
            console.print(f"summing up {len(missing)} new shards of {table.place}, once")
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda name: _sum_up(table, version, name, folder), missing))
        _sweep(cfg.path("summaries"), {path for found in paths.values() for path in found})
    return {kind: [str(path) for path in found] for kind, found in paths.items()}


def _file(folder: Path, shard: str, kind: str) -> Path:
    return folder / f"{shard.removesuffix('.parquet')}-{kind}.parquet"


def _sum_up(table: Table, version: int | None, shard: str, folder: Path) -> None:
    parts, counts = [REQUESTS.empty_table()], [ROUNDS.empty_table()]
    columns = [*LABELS, *KEPT, "conversation_id", "accepted", "drafted", "repeat_count"]
    with told(table.place, shard):
        for batch in table.dataset(version, [shard]).to_batches(columns=columns, batch_size=BATCH):
            rows = pa.Table.from_batches([batch])
            parts.append(_requests(rows))
            counts.append(_counts(rows))
    _write(_file(folder, shard, "requests"), pa.concat_tables(parts))
    _write(_file(folder, shard, "rounds"), pa.concat_tables(counts))


def _write(path: Path, rows: pa.Table) -> None:
    partial = path.with_suffix(f".{os.getpid()}.partial")
    pq.write_table(rows, partial, compression="zstd")
    os.replace(partial, path)


def _sweep(folder: Path, live: Iterable[Path]) -> None:
    """Remove what no shard of the latest version has, of this code and of others."""
    kept = set(live)
    for path in folder.glob("*/*.parquet"):
        if path not in kept:
            with suppress(FileNotFoundError):  # another process was first
                path.unlink()


def _requests(rows: pa.Table) -> pa.Table:
    """REQUESTS of ACCEPTANCE rows."""
    accepted, drafted = Lists.of(rows["accepted"]), Lists.of(rows["drafted"])
    names = rows["conversation_id"].combine_chunks().fill_null("").dictionary_encode()
    conversation = _numbers(names.dictionary.to_pylist())[np.asarray(names.indices)]
    group, example = _grouped(rows.select(SERIES))
    series = [
        json.dumps(list(row.values())) for row in rows.select(SERIES).take(example).to_pylist()
    ]
    numbers = {
        "series": _numbers(series)[group],
        "conversation": conversation,
        "conversation_group": conversation % GROUPS,
        "rounds": accepted.lengths,
        "tokens_in_rounds": accepted.sums() + accepted.lengths,
        "drafts": drafted.sums(),
        "most_drafted": drafted.largest(),
        "sound": are_sound(accepted, drafted),
    }
    return pa.table(
        {"production": rows["log"].is_valid()}
        | {name: rows[name] for name in (*LABELS, *KEPT)}
        | {"day": rows["finished_at"].cast(pa.date32())}
        | {name: pa.array(values) for name, values in numbers.items()}
        | {"repeat_count": rows["repeat_count"].fill_null(1)}
    ).cast(REQUESTS)


def are_sound(accepted: Lists, drafted: Lists) -> np.ndarray:
    """Whether the rounds of each request can be: as many in both lists, and in none more accepted
    than drafted, or less than nothing.
    """
    sound = accepted.lengths == drafted.lengths
    same = np.repeat(sound, accepted.lengths), np.repeat(sound, drafted.lengths)
    a, d = accepted.values[same[0]], drafted.values[same[1]]
    request = np.repeat(np.arange(len(sound)), accepted.lengths)[same[0]]
    sound[request[(a < 0) | (a > d)]] = False
    return sound


def _numbers(texts: list[str]) -> np.ndarray:
    """A number of 63 bits for each text: its hash."""
    found = [sha256(text.encode()).digest()[:8] for text in texts]
    return np.array([int.from_bytes(digest, "little") >> 1 for digest in found], np.int64)


def _counts(rows: pa.Table) -> pa.Table:
    """ROUNDS of those ACCEPTANCE rows whose rounds are sound."""
    accepted, drafted = Lists.of(rows["accepted"]), Lists.of(rows["drafted"])
    sound = are_sound(accepted, drafted)
    if not sound.all():
        return _counts(rows.filter(pa.array(sound)))
    labels = pa.table({"production": rows["log"].is_valid()} | {n: rows[n] for n in LABELS})
    hours = pc.floor_temporal(rows["finished_at"], unit="hour")  # pyright: ignore[reportAttributeAccessIssue]
    labels = labels.append_column("hour", hours)
    group, example = _grouped(labels)
    last = np.zeros(len(accepted.values), np.int64)
    last[np.cumsum(accepted.lengths)[accepted.lengths > 0] - 1] = 1
    size = int(drafted.values.max(initial=0)) + 1
    code = (drafted.values * size + accepted.values) * 2 + last
    code += np.repeat(group, accepted.lengths) * (2 * size * size)
    codes, counts = np.unique(code, return_counts=True)
    group, code = np.divmod(codes, 2 * size * size)
    offered, rest = np.divmod(code, 2 * size)
    found = labels.take(example[group]).append_column("drafted", pa.array(offered))
    found = found.append_column("accepted", pa.array(rest // 2))
    found = found.append_column("last", pa.array(rest % 2 == 1))
    return found.append_column("rounds", pa.array(counts)).cast(ROUNDS)


def _grouped(labels: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """(number of its group by row, a row of each group): rows with equal labels are a group."""
    group, example = np.zeros(len(labels), np.int64), np.zeros(1, np.int64)
    for column in labels.columns:
        encoded = column.combine_chunks().dictionary_encode()
        codes = np.asarray(encoded.indices.cast(pa.int64()).fill_null(len(encoded.dictionary)))
        both = group * (len(encoded.dictionary) + 1) + codes
        _, example, group = np.unique(both, return_index=True, return_inverse=True)
    return group, example
