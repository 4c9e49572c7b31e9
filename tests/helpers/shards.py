"""Whether every published byte is what its manifest says."""

from pathlib import Path

from store.shards import file_sha256, read_manifests, shard_paths


def verify(folder: Path) -> int:
    """Compare the sha256 of every published file; how many were checked. ValueError names a bad
    one.
    """
    paths = shard_paths(folder)
    expected = {e["file"]: e["sha256"] for m in read_manifests(folder) for e in m["files"]}
    for path in paths:
        if file_sha256(path) != expected[path.name]:
            raise ValueError(f"{path}: contents differ from the manifest (sha256)")
    return len(paths)
