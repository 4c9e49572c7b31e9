"""Digests of logs, kept from run to run, so that a log that did not change is not read again."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from store import files
from store.log_files import is_packed, open_log

SETTLED = 2_000_000_000
"""Nanoseconds: in a younger file a second write may leave the times as they are."""
Digest = tuple[int, str, dict[int, str]]


def digest_log(path: Path, sizes: set[int]) -> Digest:
    """(bytes, sha256, {n: sha256 of the first n bytes} for the `sizes` that fit) in one reading.

    The prefixes tell whether a log is an older one that has grown. Of a compressed log the
    decompressed bytes count: rotating and compressing it makes no new log.
    """
    digest, done, prefixes = hashlib.sha256(), 0, {}
    with open_log(path) as stream:
        total = None if is_packed(stream) else path.stat().st_size
        stops = sorted({n for n in sizes if total is None or n < total})
        while True:
            stop = next((n for n in stops if n > done), total)
            block = stream.read(1 << 20 if stop is None else min(1 << 20, stop - done))
            if not block:
                break
            digest.update(block)
            done += len(block)
            if done == stop:
                prefixes[done] = digest.hexdigest()
    if total is not None and done != total:
        raise ValueError(f"{path}: became shorter while it was read; run again")
    prefixes[done] = digest.hexdigest()
    if 0 in sizes:
        prefixes[0] = hashlib.sha256().hexdigest()
    return done, digest.hexdigest(), prefixes


class Digests:
    """Digests by path, size, times and inode in one JSON file. A damaged file is none."""

    def __init__(self, path: Path):
        self.path = path
        try:
            known = json.loads(path.read_bytes())
        except (OSError, ValueError):
            known = {}
        self.known: dict[str, Any] = known if isinstance(known, dict) else {}

    def get(self, log: Path) -> Digest | None:
        """The digest of a log that did not change since it was kept."""
        entry = self.known.get(str(log))
        try:
            if not entry or entry["stamp"] != stamp(log):
                return None
            prefixes = {int(n): str(sha256) for n, sha256 in entry["prefixes"].items()}
            return int(entry["bytes"]), str(entry["sha256"]), prefixes
        except (KeyError, TypeError, ValueError, AttributeError):
            return None  # of another form: the log is read again

    def keep(self, digests: dict[Path, tuple[list[int], Digest]]) -> None:
        """Write these, each with the stamp its file had before it was read."""
        now = time.time_ns()
        self.known = {
            str(log): {"stamp": seen, "bytes": size, "sha256": sha256, "prefixes": prefixes}
            for log, (seen, (size, sha256, prefixes)) in digests.items()
            if now - max(seen[1], seen[2]) > SETTLED
        }
        data = json.dumps(self.known, indent=1).encode() + b"\n"
        files.commit(self.path, lambda stream: stream.write(data))


def stamp(log: Path) -> list[int]:
    """Size, mtime and ctime in ns, inode: all that changes when a file does."""
    found = log.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
