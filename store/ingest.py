"""From one log to published traffic: parse, commit under content-made names, publish apart.

No Ray and no torch here, so a worker that runs `ingest_log` starts in a moment.
"""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from store.ids import short_hash
from store.logs import NoConsent, Reject, Rules, parse_log
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
        shards = [traffic / entry["file"] for entry in marker["detail"]["traffic"]]
        if all(is_complete(shard) for shard in shards):
            return _result(marker, traffic, [shard_info(s) for s in shards], reused=True)
    counts: Counter[str] = Counter()
    good = _Shards(traffic, key, TRAFFIC, SHARD_TOKENS)
    bad = _Shards(rejects, key, REJECTS, SHARD_REJECTS)
    examples: dict[str, str] = {}
    for outcome in parse_log(log, size, sha256, rules):
        counts["records"] += 1
        if isinstance(outcome, NoConsent):
            counts["no_consent"] += 1
        elif isinstance(outcome, Reject):
            counts[f"reject:{outcome.reason}"] += 1
            examples.setdefault(outcome.reason, f"{log}:{outcome.offset}")
            row = {"file": str(log), "offset": outcome.offset}
            bad.add(row | {"reason": outcome.reason, "raw": outcome.raw}, 1)
        else:
            counts["accepted"] += 1
            counts[f"finish:{outcome['finish_reason']}"] += 1
            good.add(outcome, len(outcome["prompt_ids"]) + len(outcome["output_ids"]))
    shards, detail = good.close(), {"counts": counts, "examples": examples}
    detail["traffic"] = [shard.entry() for shard in shards]
    inputs = {"bytes": size, "sha256": sha256, "rules": asdict(rules)}
    return _result(write_manifest(rejects, key, bad.close(), inputs, detail), traffic, shards)


class _Shards:
    """Rows in, numbered shards out; equal samples within a shard become one with a count."""

    def __init__(self, folder: Path, key: str, schema: pa.Schema, limit: int):
        self.folder, self.key, self.schema, self.limit = folder, key, schema, limit
        self.rows: dict[Any, dict[str, Any]] = {}
        self.size = 0
        self.shards: list[ShardInfo] = []

    def add(self, row: dict[str, Any], size: int) -> None:
        known = self.rows.get(row.get("sample_id"))
        if known is not None:
            known["repeat_count"] += 1
            return
        self.rows[row.get("sample_id", len(self.rows))] = row
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


def _result(
    marker: dict[str, Any], traffic: Path, shards: list[ShardInfo], reused: bool = False
) -> dict[str, Any]:
    return {
        "key": marker["key"],
        "inputs": marker["inputs"],
        "counts": marker["detail"]["counts"],
        "examples": marker["detail"]["examples"],
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
