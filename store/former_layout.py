"""Work folders of releases before tables: shards, and manifests that list them.

    <folder>/<name>.parquet          a shard
    <folder>/manifests/<key>.json    what a finished piece of work published

A manifest may replace older ones. In force are those that nothing replaces; shards that none of
them lists are not read. Only `flywheel migrate` uses this module.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from store.place import first_line, parse_json


@dataclass(frozen=True)
class Manifest:
    """A manifest in force. work: the key of the log's state, for those of traffic/ and rejects/."""

    path: Path
    key: str
    files: list[str]
    inputs: dict[str, Any]
    detail: dict[str, Any]

    @property
    def work(self) -> str:
        """The key of the work whose shards it lists."""
        return self.detail.get("work", self.key)


def is_former(work: Path) -> bool:
    """Whether a local work folder has the layout of a release before tables."""
    return (work / "traffic" / "manifests").is_dir()


def manifests_in_force(folder: Path) -> list[Manifest]:
    """The manifests of a folder that nothing replaces, by key.

    Raises ValueError for a damaged one.
    """
    needed = ["key", "files", "inputs", "replaces"]
    found = [(path, read_record(path, needed)) for path in _paths(folder)]
    replaced = {key for _, value in found for key in value["replaces"]}
    return [
        Manifest(
            path,
            value["key"],
            [entry["file"] for entry in value["files"]],
            value["inputs"],
            value.get("detail", {}),
        )
        for path, value in found
        if value["key"] not in replaced
    ]


def read_record(path: Path, keys: Collection[str]) -> dict[str, Any]:
    """A JSON file of the former layout with these keys. Raises ValueError if it is damaged."""
    return parse_json(path.read_bytes(), str(path), keys, "restore it from a backup")


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("manifests/[!.]*.json"))


def files_in_force(folder: Path) -> dict[str, Manifest]:
    """Every shard that is read, by name, with the first manifest that lists it."""
    found: dict[str, Manifest] = {}
    for manifest in manifests_in_force(folder):
        for name in manifest.files:
            found.setdefault(name, manifest)
    return found


def read_former(path: Path, schema: pa.Schema) -> pa.Table:
    """The rows of a shard in the columns of `schema`; null where it has none.

    Raises ValueError if it cannot be read: a copy of the data must be complete.
    """
    try:
        rows = pq.ParquetFile(path).read()
        for column in schema:
            if column.name not in rows.column_names:
                rows = rows.append_column(column.name, pa.nulls(len(rows), column.type))
        return rows.select(schema.names).cast(schema)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(
            f"{path}: cannot be read ({first_line(error)}): restore it from a backup, or remove "
            "its name from the manifests beside it to do without its rows"
        ) from error
