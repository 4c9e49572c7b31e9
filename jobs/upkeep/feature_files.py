"""The feature cache as files: which there are, which must stay, and which go first."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from jobs.base.config import Config
from jobs.dataset.samples import features_place, selection_version
from jobs.upkeep.pins import unfinished_samples
from store.tables import Table

KEYS = ["features_key", "file"]


@dataclass(frozen=True)
class FeatureFile:
    """A file of features/<key>. harvested_at: of its newest sample. needed: whether a sample of it
    is needed now, so that it must stay.
    """

    key: str
    name: str
    samples: int
    bytes: int
    harvested_at: datetime
    needed: bool


def feature_files(cfg: Config) -> list[FeatureFile]:
    """Every file of the feature cache that feature_index lists, the oldest first.

    Needed are samples of the selection (select.version) under the configured taps, and samples of
    training runs that can go on, under any.
    """
    index = cfg.table("feature_index")
    version = index.version()
    selection = cfg.table("selection").read(["sample_id"], version=selection_version(cfg))
    selected = pc.field("sample_id").isin(selection["sample_id"].combine_chunks())
    wanted = (pc.field("features_key") == features_place(cfg).name) & selected
    wanted |= pc.field("sample_id").isin(unfinished_samples(cfg))
    needed = {(row["features_key"], row["file"]) for row in _files(index, version, wanted)}
    found = [
        FeatureFile(
            row["features_key"],
            row["file"],
            row["sample_id"],
            row["file_bytes"],
            row["harvested_at"],
            (row["features_key"], row["file"]) in needed,
        )
        for row in _files(index, version)
    ]
    return sorted(found, key=lambda file: (file.harvested_at, file.key, file.name))


def _files(index: Table, version: int | None, where: pc.Expression | None = None) -> list[dict]:
    """For each file with such rows: the columns KEYS, sample_id (how many), file_bytes and
    harvested_at (the latest).
    """
    columns = [*KEYS, "sample_id", "file_bytes", "harvested_at"]
    parts = [
        _grouped(pa.Table.from_batches([batch]), "count")
        for batch in index.batches(columns, where, version)
    ]
    return _grouped(pa.concat_tables(parts), "sum").to_pylist() if parts else []


def _grouped(rows: pa.Table, samples: str) -> pa.Table:
    sums = [("sample_id", samples), ("file_bytes", "max"), ("harvested_at", "max")]
    return rows.group_by(KEYS).aggregate(sums).rename_columns([*KEYS, *(name for name, _ in sums)])


def evicted(files: Sequence[FeatureFile], gib: float, before: datetime | None) -> set[FeatureFile]:
    """Which of `files` (the oldest first) go: those harvested before `before`, then the oldest
    until the rest has at most `gib` GiB (0: no limit). Those that are needed stay.
    """
    free = [file for file in files if not file.needed]
    gone = {file for file in free if before is not None and file.harvested_at < before}
    total = sum(file.bytes for file in files if file not in gone)
    for file in free if gib else ():
        if file not in gone and total > gib * 2**30:
            gone.add(file)
            total -= file.bytes
    return gone
