"""What training runs and windows are pinned to: the versions of tables, and the samples."""

import json
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.base.config import Config
from jobs.training.runs import VERSIONS
from jobs.training.states import is_unfinished
from store import windows
from store.place import Place, first_line

FORMER = "pin-former-"
"""How names of pins begin that `flywheel migrate` wrote: their runs cannot go on."""


def kept_versions(cfg: Config) -> dict[str, set[int]]:
    """The versions of each table that a pin or a window names; gc keeps them, whether the run has
    ended or not.

    Raises ValueError for a pin that cannot be read: what it needs would be removed.
    """
    kept: dict[str, set[int]] = {}
    for place, name in _pins(cfg):
        try:
            metadata = pq.read_schema(place.open(name)).metadata or {}
            versions = json.loads(metadata[VERSIONS])
        except (pa.ArrowInvalid, KeyError, ValueError) as error:
            raise _damaged(place, name, error) from error
        for table, version in versions.items():
            if version is not None:
                kept.setdefault(table, set()).add(version)
    for table, needed in windows.needed_versions(windows.read(cfg.table("windows"))).items():
        kept.setdefault(table, set()).update(needed)
    return kept


def unfinished_samples(cfg: Config) -> pa.Array:
    """Ids of the samples of every run that can go on, each once."""
    found = [pa.array([], pa.string())]
    for place, name in _pins(cfg):
        run, _, file = name.partition("/")
        if not file.startswith(FORMER) and is_unfinished(cfg, run):
            try:
                rows = pq.read_table(place.open(name), columns=["sample_id"])
            except pa.ArrowInvalid as error:
                raise _damaged(place, name, error) from error
            found += rows["sample_id"].cast(pa.string()).chunks
    return pa.chunked_array(found).unique()


def _pins(cfg: Config) -> Iterator[tuple[Place, str]]:
    runs = cfg.place("runs")
    for found in runs.objects():
        folder, _, file = found.name.partition("/")
        if folder and file.startswith("pin-") and file.endswith(".parquet"):
            yield runs, found.name


def _damaged(place: Place, name: str, error: Exception) -> ValueError:
    return ValueError(
        f"{place}/{name} is damaged ({first_line(error)}), so what this run needs is unknown: move "
        "the run's folder out of runs/, then run the same command again"
    )
