"""Digests of logs, kept from run to run, so that a log that did not change is not read again."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from store import files
from store.log_files import is_packed, open_log

SETTLED = 2_000_000_000
"""Nanoseconds. Digests of younger files are not kept: a second write may not change their times."""
Digest = tuple[int, str, dict[int, str]]


def digest_log(path: Path, sizes: set[int]) -> Digest:
    """Size in bytes, sha256, and {n: sha256 of the first n bytes} of a log, in one pass.

    n is every one of `sizes` that the log reaches, and its own size. The prefixes tell whether a
    log is an older one that has grown. For a compressed log, the decompressed bytes are counted and
    hashed, so a log that is rotated and compressed is not a new one. Raises ValueError if the file
    became shorter while it was read.
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
    """Digests by path, size, times and inode in one JSON file. A damaged file counts as empty."""

    def __init__(self, path: Path):
        self.path = path
        try:
            known = json.loads(path.read_bytes())
        except (OSError, ValueError):
            known = {}
        self.known: dict[str, Any] = known if isinstance(known, dict) else {}

    def get(self, log: Path) -> Digest | None:
        """The kept digest of a log; None if there is none or the log has changed since."""
        entry = self.known.get(str(log))
        try:
            if not entry or entry["stamp"] != stamp(log):
                return None
            prefixes = {int(n): str(sha256) for n, sha256 in entry["prefixes"].items()}
            return int(entry["bytes"]), str(entry["sha256"]), prefixes
        except (KeyError, TypeError, ValueError, AttributeError):
            return None  # not in the form that is written here: the log is read again

    def keep(self, digests: dict[Path, tuple[list[int], Digest]]) -> None:
        """Keep these digests and drop all others; files younger than SETTLED are left out.

        digests: path -> (the stamp its file had before it was read, its digest).
        """
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
