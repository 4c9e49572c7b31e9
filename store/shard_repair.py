"""Repair of a folder of feature shards: damaged rows are removed, finished shards are published.

An interrupted harvest leaves shards that no manifest lists. The next harvest adopts them, even if
it would divide the samples into other shards. Checking every byte of a cache costs as much as
reading it. So a file is checked again only if its size or time changed. A reader that finds a bad
row touches the file for this reason.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from store import files
from store.features import find_faults
from store.ids import short_hash
from store.shards import ShardInfo, read_manifests, shard_info, write_manifest, write_shard

SEEN = "seen.json"
Opened = Callable[[Path], pq.ParquetFile]


@dataclass
class Mended:
    """What was repaired.

    damaged: sample id -> what was wrong. lost: files that were gone or could not be read. adopted:
    number of samples in shards that were published now.
    """

    damaged: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    adopted: int = 0


def mend(folder: Path, opened: Opened) -> Mended:
    """Take damaged rows and files out of what `folder` publishes, and publish its finished shards.

    opened: opens a path as a shard of this cache, and raises ValueError if it is none.
    """
    found = Mended()
    for manifest in read_manifests(folder):
        _mend_manifest(folder, manifest, opened, found)
    leftovers = _leftovers(folder, opened)
    if leftovers:
        publish(folder, leftovers, {"adopted": len(leftovers)})
        found.adopted = sum(shard.rows for shard in leftovers)
    remember(folder)
    return found


def publish(folder: Path, shards: list[ShardInfo], inputs: dict[str, Any]) -> None:
    """Publish these shards beside the manifests in force. The key depends on both: samples of a
    shard that was removed may come back in a file of the same name.
    """
    names = sorted(shard.path.name for shard in shards)
    key = short_hash([names, [manifest["key"] for manifest in read_manifests(folder)]])
    write_manifest(folder, key, shards, inputs)


def remember(folder: Path) -> None:
    """Record size and time of every published file; call it when all of them are known intact."""
    names = {entry["file"] for m in read_manifests(folder) for entry in m["files"]}
    if names:
        seen = {name: _stamp(folder / name) for name in sorted(names)}
        data = json.dumps(seen, indent=1).encode()
        files.commit(folder / SEEN, lambda stream: stream.write(data))


def _mend_manifest(folder: Path, manifest: dict[str, Any], opened: Opened, found: Mended) -> None:
    seen = files.read_json(folder / SEEN) if (folder / SEEN).is_file() else {}
    kept: list[ShardInfo] = []
    gone: list[Path] = []
    for entry in manifest["files"]:
        path = folder / entry["file"]
        stamp = _stamp(path)
        if stamp and stamp == seen.get(path.name) and stamp[0] == entry["bytes"]:
            kept.append(_info(folder, entry))
            continue
        rest = _look(path, opened, found)
        if rest is None or rest.path != path:
            gone.append(path)
        if rest:
            kept.append(rest)
    entries = [shard.entry() for shard in sorted(kept, key=lambda shard: shard.path.name)]
    if entries != manifest["files"]:
        key = short_hash(["mended", manifest["key"], entries])
        inputs = {"mended": manifest["key"]}
        write_manifest(folder, key, kept, inputs, replaces=[manifest["key"]])
        for path in gone:
            path.unlink(missing_ok=True)


def _look(path: Path, opened: Opened, found: Mended) -> ShardInfo | None:
    """The shard without its damaged rows; None if nothing is left of it."""
    try:
        file = opened(path)
        faults = find_faults(path, file)
        if not faults:
            return shard_info(path)
        found.damaged |= faults
        table = file.read()
    except ValueError:
        found.lost.append(path.name)
        return None
    bad = pa.array(sorted(faults), pa.string())
    rest = table.filter(~pc.field("sample_id").isin(bad))
    if not rest.num_rows:
        return None
    return write_shard(path.with_name(f"{short_hash(rest['sample_id'].to_pylist())}.parquet"), rest)


def _leftovers(folder: Path, opened: Opened) -> list[ShardInfo]:
    """Undamaged shards that no manifest lists, of samples that no other shard has.

    A shard whose samples are all published has no use, so it is deleted: features are large.
    """
    listed = {entry["file"] for m in read_manifests(folder) for entry in m["files"]}
    published: set[str] = set()
    for name in listed:
        published |= _names(opened(folder / name))
    taken = set(published)
    left = []
    for path in sorted(folder.glob("[!.]*.parquet")):
        if path.name in listed:
            continue
        try:
            file = opened(path)
            names = _names(file)
            if names <= published:
                path.unlink(missing_ok=True)
            elif names.isdisjoint(taken) and not find_faults(path, file):
                left.append(shard_info(path))
                taken |= names
        except ValueError:
            continue  # of another cache, or incomplete: not read; harvest computes its samples
    return left


def _names(file: pq.ParquetFile) -> set[str]:
    return set(file.read(["sample_id"])["sample_id"].to_pylist())


def _stamp(path: Path) -> list[int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return [stat.st_size, stat.st_mtime_ns]


def _info(folder: Path, entry: dict[str, Any]) -> ShardInfo:
    fields = {name: entry[name] for name in ("rows", "tokens", "bytes", "sha256")}
    return ShardInfo(path=folder / entry["file"], **fields)
