"""From one log to published traffic: parse, commit shards named after their content, then publish.

No Ray and no torch here, so a worker that runs `ingest_log` starts quickly.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
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

READING = 3
"""Version of the parsing. It goes up when the same bytes under the same rules give other rows; logs
are then read again."""
SHARD_TOKENS = 8_000_000  # about 32 MiB of ids in memory
SHARD_REJECTS = 10_000
MAX_REJECTS_BYTES = 4 << 20
"""Bytes of rejects kept of one log. Of rejects beyond that, only place and reason are kept."""
MAX_NAMES = 100  # names of one kind that are counted separately
MAX_NAME = 100  # characters


def ingest_log(
    log: Path, size: int, sha256: str, rules: Rules, traffic: Path, rejects: Path
) -> dict[str, Any]:
    """Parse one log into traffic and reject shards; returns a summary (as a Ray task, it sends back
    nothing else).

    The manifest in rejects/ is the log's completion marker. It carries the counts and lists the
    traffic shards. These stay unpublished until the whole run is accepted.
    """
    key = short_hash([READING, sha256, asdict(rules)])
    marker = read_manifest(rejects, key)
    if marker is not None:
        shards = _all_kept(traffic, marker["detail"]["traffic"])
        refused = _all_kept(rejects, marker["files"])
        if shards is not None and refused is not None:
            return _result(marker, shards, refused, reused=True)
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
    shards, refused = good.close(), bad.close()
    detail = {
        "counts": tally.counts,
        "names": tally.names,
        "examples": tally.examples,
        "traffic": [shard.entry() for shard in shards],
    }
    inputs = {"bytes": size, "sha256": sha256, "rules": asdict(rules), "reading": READING}
    return _result(write_manifest(rejects, key, refused, inputs, detail), shards, refused)


def _outcomes(log: Path, size: int, sha256: str, rules: Rules) -> Iterator[Outcome]:
    """The outcome of every record, or one of the whole file if it holds no JSON lines."""
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
        """Count one outcome, and remember where each reason was found first."""
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
    """Rows in, numbered shards out; equal samples within a shard become one row with a count."""

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


def _all_kept(folder: Path, entries: list[dict[str, Any]]) -> list[ShardInfo] | None:
    """The shards of these entries of a manifest; None if one is missing or incomplete."""
    shards = [shard for entry in entries if (shard := _kept(folder, entry))]
    return shards if len(shards) == len(entries) else None


def _kept(folder: Path, entry: dict[str, Any]) -> ShardInfo | None:
    """A shard as its marker describes it, if its file is complete. It is not hashed again."""
    fields = {name: entry[name] for name in ("rows", "tokens", "bytes", "sha256")}
    path = folder / entry["file"]
    whole = path.is_file() and path.stat().st_size == entry["bytes"] and is_complete(path)
    return ShardInfo(path=path, **fields) if whole else None


def _result(
    marker: dict[str, Any],
    shards: list[ShardInfo],
    refused: list[ShardInfo],
    reused: bool = False,
) -> dict[str, Any]:
    detail = marker["detail"]
    return {
        "key": marker["key"],
        "inputs": marker["inputs"],
        "counts": detail["counts"],
        "names": detail["names"],
        "examples": detail["examples"],
        "shards": shards,
        "refused": refused,
        "reused": reused,
    }


def replaced(
    live: Sequence[dict[str, Any]], result: dict[str, Any], prefixes: dict[int, str]
) -> list[dict[str, Any]]:
    """Those manifests of `live` that are of the same log, when it was shorter or under other rules.

    prefixes: {n: sha256 of the log's first n bytes}.
    """
    return [
        manifest
        for manifest in live
        if _work(manifest) != result["key"]
        and prefixes.get(manifest["inputs"]["bytes"]) == manifest["inputs"]["sha256"]
    ]


def publish(traffic: Path, log: Path, result: dict[str, Any], prefixes: dict[int, str]) -> bool:
    """List a log's shards in traffic/. False if they were listed already.

    Manifests of the same log, when it was shorter or under other rules, are replaced. Replaced
    files of an older READING are deleted: that version may have kept what must not be kept. Other
    replaced files stay, because someone may be reading them.
    """
    detail = {"log": str(log), "counts": result["counts"]}
    stale = _list(traffic, result["shards"], result, prefixes, detail)
    _remove(traffic, [m for m in stale or [] if m["inputs"].get("reading") != READING])
    return stale is not None


def settle(rejects: Path, result: dict[str, Any], prefixes: dict[int, str]) -> None:
    """Publish a log's rejects in place of those from when it was shorter or under other rules.

    The replaced files are deleted: former rules may have kept what must not be kept.
    """
    _remove(rejects, _list(rejects, result["refused"], result, prefixes, {}) or [])


def _remove(folder: Path, replaced: list[dict[str, Any]]) -> None:
    """Delete the files of replaced manifests that no other one lists."""
    listed = {entry["file"] for m in read_manifests(folder) for entry in m["files"]}
    for name in {entry["file"] for m in replaced for entry in m["files"]} - listed:
        (folder / name).unlink(missing_ok=True)


def _list(
    folder: Path,
    shards: list[ShardInfo],
    result: dict[str, Any],
    prefixes: dict[int, str],
    detail: dict[str, Any],
) -> list[dict[str, Any]] | None:
    """Publish the shards of a log; returns the manifests that they replace. None if they were
    already the only ones of this log in force.
    """
    live = read_manifests(folder)
    ours = [m["key"] for m in live if _work(m) == result["key"]]
    stale = replaced(live, result, prefixes)
    if ours and not stale:
        return None
    replaces = [m["key"] for m in stale] + ours
    # A return to former rules needs another key: theirs is the key of a replaced manifest.
    known = read_manifest(folder, result["key"]) is not None
    key = short_hash([result["key"], sorted(replaces)]) if replaces or known else result["key"]
    work = {"work": result["key"]}
    write_manifest(folder, key, shards, result["inputs"], work | detail, replaces)
    return stale


def _work(manifest: dict[str, Any]) -> str:
    """The key of the work whose shards a manifest lists; for a completion marker, its own key."""
    return manifest["detail"].get("work", manifest["key"])
