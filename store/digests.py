"""Digests of logs, kept from run to run, so that a log that did not change is not read again."""

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from store.log_files import Stamp, is_packed, on_disk, open_log
from store.place import Place

SETTLED = 2_000_000_000
"""Nanoseconds. Digests of younger files are not kept: a second write may not change their times."""
FILE = "logs.json"
Digest = tuple[int, str, dict[int, str]]


def digest_log(log: str, sizes: set[int], copies: Path | None = None) -> Digest:
    """Size in bytes, sha256, and {n: sha256 of the first n bytes} of a log, in one pass.

    n is every one of `sizes` that the log reaches, and its own size. The prefixes tell whether a
    log is an older one that has grown. For a compressed log, the decompressed bytes are counted and
    hashed, so a log that is rotated and compressed is not a new one. `copies` as in `on_disk`.
    Raises ValueError if the file became shorter while it was read.
    """
    digest, done, prefixes = hashlib.sha256(), 0, {}
    with on_disk(log, copies) as path, open_log(path) as stream:
        total = None if is_packed(stream) else path.stat().st_size
        stops = iter(sorted(n for n in sizes if n > 0 and (total is None or n < total)))
        stop = next(stops, total)
        while True:
            block = stream.read(1 << 20 if stop is None else min(1 << 20, stop - done))
            if not block:
                break
            digest.update(block)
            done += len(block)
            if done == stop:
                prefixes[done] = digest.hexdigest()
                stop = next(stops, total)
    if total is not None and done != total:
        raise ValueError(f"{log}: became shorter while it was read; run again")
    prefixes[done] = digest.hexdigest()
    if 0 in sizes:
        prefixes[0] = hashlib.sha256().hexdigest()
    return done, digest.hexdigest(), prefixes


class Digests:
    """Digests of logs with their stamps in one JSON object. If it is damaged, it counts as empty.

    `counted` is kept in it too: what was counted over the samples of some version of traffic.
    """

    def __init__(self, place: Place):
        self.place = place
        self.data = place.read(FILE)
        try:
            found = json.loads(self.data or b"{}")
        except ValueError:
            found = None
        found = found if isinstance(found, dict) else {}
        self.known: dict[str, Any] = _dict(found.get("logs"))
        self.counted: dict[str, Any] = _dict(found.get("counted"))

    def get(self, log: str, stamp: Stamp) -> Digest | None:
        """The kept digest of a log; None if there is none or the log has changed since."""
        entry = self.known.get(log)
        try:
            if not entry or entry["stamp"] != stamp:
                return None
            prefixes = {int(n): str(sha256) for n, sha256 in entry["prefixes"].items()}
            return int(entry["bytes"]), str(entry["sha256"]), prefixes
        except (KeyError, TypeError, ValueError, AttributeError):
            return None  # not in the form that is written here: the log is read again

    def keep(self, digests: Mapping[str, tuple[Stamp, Digest]]) -> None:
        """Keep these digests and drop all others; files younger than SETTLED are left out.

        digests: log -> (the stamp it had before it was read, its digest).
        """
        self.known = {
            log: {"stamp": seen, "bytes": size, "sha256": sha256, "prefixes": prefixes}
            for log, (seen, (size, sha256, prefixes)) in digests.items()
            if _is_settled(log, seen)
        }
        value = {"logs": self.known, "counted": self.counted}
        data = json.dumps(value, indent=1).encode() + b"\n"
        if data != self.data:
            self.place.write(FILE, data)
            self.data = data


def _is_settled(log: str, stamp: Stamp) -> bool:
    """Whether any later write will change the stamp; an object's e_tag always does."""
    return "://" in log or time.time_ns() - max(stamp[1], stamp[2]) > SETTLED


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
