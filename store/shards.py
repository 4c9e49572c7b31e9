"""The one commit protocol of the store: shards, then a manifest, and readers that follow manifests.

    <folder>/<name>.parquet          a shard: complete when it is at its final name
    <folder>/manifests/<key>.json    what a finished piece of work published

Names come from the input of the work, never from a clock or a random id, so a rerun finds what is
done. A manifest is created only if absent: if two writers race, the second gets the manifest of the
first. A manifest may replace older ones (a log that has grown, other settings); readers see the
union of the manifests that nothing replaces. Files that no manifest lists are never read.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dflash.identity import file_sha256
from store import files
from store.schemas import LATER, count_tokens

ROW_GROUP_BYTES = 64 << 20
TOKENS_KEY = b"flywheel.tokens"


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One finished shard. `bytes` is the size on disk, `sha256` of the whole file."""

    path: Path
    rows: int
    tokens: int
    bytes: int
    sha256: str

    def entry(self) -> dict[str, Any]:
        """The entry of a manifest: the file's name instead of its path, so folders can be moved."""
        fields = asdict(self)
        return {"file": fields.pop("path").name, **fields}


def write_shard(path: Path, table: pa.Table) -> ShardInfo:
    """Commit `table` as a Parquet shard at `path` (an existing one is replaced in one step).

    zstd-1; dictionaries for strings only (tensor bytes do not repeat); row groups of about 64 MiB.
    The footer is read back and compared before the rename. Raises OSError (disk full, no access).
    """
    metadata = {**(table.schema.metadata or {}), TOKENS_KEY: str(count_tokens(table)).encode()}
    table = table.replace_schema_metadata(metadata)
    strings = [f.name for f in table.schema if pa.types.is_string(f.type)]
    per_row = max(1, table.nbytes // max(1, table.num_rows))

    def write(stream: Any) -> None:
        pq.write_table(
            table,
            stream,
            compression="zstd",
            compression_level=1,
            use_dictionary=strings,  # pyright: ignore[reportArgumentType]
            row_group_size=max(1, ROW_GROUP_BYTES // per_row),
        )

    def check(temporary: Path) -> None:
        written = pq.ParquetFile(temporary)
        if written.metadata.num_rows != table.num_rows or not written.schema_arrow.equals(
            table.schema
        ):
            raise OSError(f"{path}: the shard read back differs from what was written")

    files.commit(path, write, check)
    return shard_info(path)


def shard_info(path: Path) -> ShardInfo:
    """Read a finished shard's facts. Raises ValueError naming the file if it is not one."""
    try:
        footer = pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path}: not a complete Parquet shard ({error})") from error
    tokens = (footer.schema_arrow.metadata or {}).get(TOKENS_KEY, b"0")
    return ShardInfo(
        path=path,
        rows=footer.metadata.num_rows,
        tokens=int(tokens),
        bytes=path.stat().st_size,
        sha256=file_sha256(path),
    )


def is_complete(path: Path) -> bool:
    """Whether a readable shard is at its final name: then a rerun can skip it."""
    try:
        pq.read_metadata(path)
    except (OSError, pa.ArrowInvalid):
        return False
    return True


def write_manifest(
    folder: Path,
    key: str,
    shards: list[ShardInfo],
    inputs: dict[str, Any],
    detail: dict[str, Any] | None = None,
    replaces: list[str] | None = None,
) -> dict[str, Any]:
    """Publish `shards` (all in `folder`) as manifest `key`; returns the manifest that is in force.

    `inputs` says what the shards were made from, `detail` is anything JSON a reader may want.
    If `key` exists already, the existing manifest is returned and nothing is written.
    """
    assert all(shard.path.parent == folder for shard in shards), "shards live beside manifests/"
    manifest = {
        "key": key,
        "rows": sum(s.rows for s in shards),
        "tokens": sum(s.tokens for s in shards),
        "files": [s.entry() for s in sorted(shards, key=lambda s: s.path.name)],
        "inputs": inputs,
        "detail": detail or {},
        "replaces": sorted(replaces or []),
    }
    path = folder / "manifests" / f"{key}.json"
    data = json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n"
    files.commit(path, lambda stream: stream.write(data), overwrite=False)
    return _load_manifest(path)


def _load_manifest(path: Path) -> dict[str, Any]:
    return files.read_json(path, ["key", "rows", "files", "inputs", "replaces"])


def read_manifest(folder: Path, key: str) -> dict[str, Any] | None:
    """The manifest `key`, replaced or not; None if that work was never finished."""
    path = folder / "manifests" / f"{key}.json"
    return _load_manifest(path) if path.exists() else None


def read_manifests(folder: Path) -> list[dict[str, Any]]:
    """Manifests in force (not replaced by another), by key. Empty if nothing was published."""
    manifests = [_load_manifest(p) for p in sorted(folder.glob("manifests/[!.]*.json"))]
    replaced = {key for manifest in manifests for key in manifest["replaces"]}
    return [manifest for manifest in manifests if manifest["key"] not in replaced]


def shard_paths(folder: Path) -> list[Path]:
    """Files of all manifests in force, each once. Raises ValueError naming a missing file or one
    whose size is not what the manifest says (a cheap check; `verify` compares contents).
    """
    sizes = {e["file"]: e["bytes"] for m in read_manifests(folder) for e in m["files"]}
    for name, size in sorted(sizes.items()):
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path}: listed in a manifest but missing; {_REPAIR}")
        if path.stat().st_size != size:
            raise ValueError(
                f"{path}: {path.stat().st_size} bytes, the manifest says {size}; {_REPAIR}"
            )
    return [folder / name for name in sorted(sizes)]


_REPAIR = "remove the file and its manifest, then run the stage that wrote it again"


def read_dataset(
    folder: Path,
    schema: pa.Schema,
    columns: list[str] | None = None,
    filters: pc.Expression | None = None,
) -> pa.Table:
    """All published rows of `folder`, in file order; a typed empty table if there are none.

    Raises ValueError naming the file when one is missing, damaged or of another schema.
    """
    wanted = schema.names if columns is None else columns
    out = pa.schema([schema.field(name) for name in wanted])
    tables = []
    for path in shard_paths(folder):
        try:
            found = pq.read_schema(path)
            absent = [name for name in LATER if name in schema.names and name not in found.names]
            present = pa.schema([field for field in schema if field.name not in absent])
            if not found.equals(present, check_metadata=False):
                raise ValueError(f"{path}: columns {found.names} do not fit {schema.names}")
            names = [name for name in wanted if name not in absent]
            table = pq.read_table(path, columns=names, filters=filters, partitioning=None)  # pyright: ignore[reportArgumentType]
            for name in absent:
                table = table.append_column(name, pa.nulls(len(table), schema.field(name).type))
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"{path}: cannot be read ({error}); {_REPAIR}") from error
        tables.append(table.select(wanted).cast(out))
    return pa.concat_tables(tables) if tables else out.empty_table()
