"""From one log to published traffic: parse, commit under content-made names, publish apart.

No Ray and no torch here, so a worker that runs `ingest_log` starts in a moment.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from store.ids import short_hash
from store.log_files import other_kind
from store.log_formats import NotUsed, Outcome, Reject, Rules, parse_log
from store.schemas import REJECTS, TRAFFIC
from store.shards import (
    ShardInfo,
    is_complete,
    read_manifest,
    read_manifests,
    shard_info,
    write_manifest,
    write_shard,
)

SHARD_TOKENS = 8_000_000  # about 32 MiB of ids in memory
SHARD_REJECTS = 10_000
MAX_REJECTS_BYTES = 4 << 20
"""Bytes of rejects kept of one log; what is beyond has its place and reason only."""
MAX_NAMES = 100  # of one kind that are told apart
MAX_NAME = 100  # characters


def ingest_log(
    log: Path, size: int, sha256: str, rules: Rules, traffic: Path, rejects: Path
) -> dict[str, Any]:
    """Parse one log into traffic and reject shards (a Ray task; only this summary travels).

    The manifest in rejects/ is the log's completion marker. It carries the counts and the traffic
    shards; those stay unpublished until the run as a whole is accepted.
    """
    key = short_hash([sha256, asdict(rules)])
    marker = read_manifest(rejects, key)
    if marker is not None:
        entries = marker["detail"]["traffic"]
        shards = [shard for entry in entries if (shard := _kept(traffic, entry))]
        if len(shards) == len(entries):
            return _result(marker, shards, reused=True)
    tally = Tally(log)
    good = _Shards(traffic, key, TRAFFIC, SHARD_TOKENS)
    bad = _Shards(rejects, key, REJECTS, SHARD_REJECTS)
    room = MAX_REJECTS_BYTES
    for outcome in _outcomes(log, size, sha256, rules):
        tally.add(outcome)
        if isinstance(outcome, Reject):
            raw = outcome.raw if len(outcome.raw) <= room else b""
            room -= len(raw)
            row = {"file": str(log), "offset": outcome.offset}
            bad.add(row | {"reason": outcome.reason, "raw": raw}, 1)
        elif not isinstance(outcome, NotUsed):
            good.add(outcome, len(outcome["prompt_ids"]) + len(outcome["output_ids"]))
    shards = good.close()
    detail = {
        "counts": tally.counts,
        "names": tally.names,
        "examples": tally.examples,
        "traffic": [shard.entry() for shard in shards],
    }
    inputs = {"bytes": size, "sha256": sha256, "rules": asdict(rules)}
    return _result(write_manifest(rejects, key, bad.close(), inputs, detail), shards)


def _outcomes(log: Path, size: int, sha256: str, rules: Rules) -> Iterator[Outcome]:
    """Of every record, or one of the whole file where it holds no JSON lines."""
    kind = other_kind(log)
    if kind is not None:
        yield NotUsed(0, "text_log", f"{log.name} is {kind}")
    else:
        yield from parse_log(log, size, sha256, rules)


class Tally:
    """What became of the records of one log.

    counts: "records", "accepted", "finish:REASON", and by class "reject:REASON" and
    "unused:REASON". names: "model:NAME" of accepted records, "REASON:WHAT" of others.
    """

    def __init__(self, log: Path):
        self.log = log
        self.counts: Counter[str] = Counter()
        self.names: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, outcome: Outcome) -> None:
        """Count one outcome; remembers where the first of each reason is."""
        self.counts["records"] += 1
        if isinstance(outcome, Reject | NotUsed):
            kind = "reject" if isinstance(outcome, Reject) else "unused"
            self.counts[f"{kind}:{outcome.reason}"] += 1
            self.examples.setdefault(outcome.reason, f"{self.log}:{outcome.offset}")
            if outcome.detail:
                self._name(f"{outcome.reason}:{outcome.detail}")
        else:
            self.counts["accepted"] += 1
            self.counts[f"finish:{outcome['finish_reason']}"] += 1
            if outcome["model"] is not None:
                self._name(f"model:{outcome['model']}")

    def _name(self, name: str) -> None:
        name = name if len(name) <= MAX_NAME else name[:MAX_NAME] + "..."
        kind = name.partition(":")[0] + ":"
        if name not in self.names and sum(n.startswith(kind) for n in self.names) >= MAX_NAMES:
            name = kind + "(others)"
        self.names[name] += 1


class _Shards:
    """Rows in, numbered shards out; equal samples within a shard become one with a count."""

    def __init__(self, folder: Path, key: str, schema: pa.Schema, limit: int):
        self.folder, self.key, self.schema, self.limit = folder, key, schema, limit
        self.rows: dict[Any, dict[str, Any]] = {}
        self.size = 0
        self.shards: list[ShardInfo] = []

    def add(self, row: dict[str, Any], size: int) -> None:
        # Under another label it is another row: store.traffic_table needs to see every label.
        name = (row["sample_id"], row["conversation_id"]) if "sample_id" in row else len(self.rows)
        known = self.rows.get(name)
        if known is not None:
            known["repeat_count"] += 1
            return
        self.rows[name] = row
        self.size += size
        if self.size >= self.limit:
            self._write()

    def close(self) -> list[ShardInfo]:
        if self.rows:
            self._write()
        return self.shards

    def _write(self) -> None:
        path = self.folder / f"{self.key}-{len(self.shards):05d}.parquet"
        if is_complete(path):  # an earlier run was killed after this shard
            self.shards.append(shard_info(path))
        else:
            table = pa.Table.from_pylist(list(self.rows.values()), schema=self.schema)
            self.shards.append(write_shard(path, table))
        self.rows, self.size = {}, 0


def _kept(folder: Path, entry: dict[str, Any]) -> ShardInfo | None:
    """A shard as its marker describes it, if it is there in full: its bytes are not read again."""
    fields = {name: entry[name] for name in ("rows", "tokens", "bytes", "sha256")}
    path = folder / entry["file"]
    whole = path.is_file() and path.stat().st_size == entry["bytes"] and is_complete(path)
    return ShardInfo(path=path, **fields) if whole else None


def _result(
    marker: dict[str, Any], shards: list[ShardInfo], reused: bool = False
) -> dict[str, Any]:
    detail = marker["detail"]
    return {
        "key": marker["key"],
        "inputs": marker["inputs"],
        "counts": detail["counts"],
        "names": detail["names"],
        "examples": detail["examples"],
        "shards": shards,
        "reused": reused,
    }


def publish(traffic: Path, log: Path, result: dict[str, Any], prefixes: dict[int, str]) -> bool:
    """List a log's shards in traffic/. False if they were listed already.

    Manifests of the same log in a shorter state, or under other rules, are replaced.
    """
    live = read_manifests(traffic)
    ours = [m["key"] for m in live if m["detail"]["work"] == result["key"]]
    stale = [
        m["key"]
        for m in live
        if m["detail"]["work"] != result["key"]
        and prefixes.get(m["inputs"]["bytes"]) == m["inputs"]["sha256"]
    ]
    if ours and not stale:
        return False
    replaces = stale + ours
    # Going back to former rules must not meet the manifest that was replaced: hence another key.
    key = short_hash([result["key"], sorted(replaces)]) if replaces else result["key"]
    detail = {"work": result["key"], "log": str(log), "counts": result["counts"]}
    write_manifest(traffic, key, result["shards"], result["inputs"], detail, replaces)
    return True
