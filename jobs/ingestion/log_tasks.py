"""The Ray tasks of ingest: hash logs that are new or have changed, and parse logs."""

from pathlib import Path
from typing import Any

import ray

from store.digests import Digest, Digests, digest_log, stamp
from store.log_formats import Rules
from store.log_to_traffic import ingest_log, replaced
from store.shards import read_manifests

Result = dict[str, Any]
Stamped = tuple[list[int], Digest]


def digests(kept: Digests, logs: list[Path], *folders: Path) -> dict[Path, Stamped]:
    """(stamp, digest) of each log (store/digests.py). Only logs that changed since the last run are
    read. `folders`: where manifests have the sizes of earlier states of these logs.
    """
    sizes = {m["inputs"]["bytes"] for folder in folders for m in read_manifests(folder)}
    stamps = {log: stamp(log) for log in logs}
    known = {log: kept.get(log) for log in logs}
    unread = [log for log, digest in known.items() if digest is None]
    read = dict(zip(unread, each(digest_log, [(log, sizes) for log in unread]), strict=True))
    return {log: (stamps[log], known[log] or read[log]) for log in logs}


def ingest_each(
    digested: dict[Path, Stamped], rules: Rules, traffic: Path, rejects: Path
) -> dict[str, Result]:
    """{sha256 of a log: what `ingest_log` returns}, one task per distinct content. Shards are
    written but not published yet.
    """
    unique = {sha: (log, size) for log, (_, (size, sha, _)) in digested.items()}
    jobs = [(log, size, sha, rules, traffic, rejects) for sha, (log, size) in unique.items()]
    return dict(zip(unique, each(ingest_log, jobs), strict=True))


def takes_back(traffic: Path, result: Result, prefixes: dict[int, str]) -> bool:
    """Whether traffic/ still has samples of this log for the same target that were accepted under
    other rules: for instance answers of another model, before ingest.models named the right one.
    """
    identity = result["inputs"]["rules"]["target_id"]
    stale = replaced(read_manifests(traffic), result, prefixes)
    return any(m["inputs"]["rules"]["target_id"] == identity for m in stale)


def each(function: Any, arguments: list[tuple]) -> list[Any]:
    """Run `function` on each tuple of arguments as a Ray task; results in order."""
    task = ray.remote(function)
    return ray.get([task.remote(*args) for args in arguments])
