"""What `flywheel gc` removes, by folder."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pyarrow.compute as pc

from jobs.base.config import Config
from store.collect import unneeded
from store.lease import lease
from store.log_states import SHARDED
from store.place import Found, Place
from store.schemas import TABLES
from store.tables import Table

BATCH = 1000
"""Objects that are deleted under one lease: whoever waits for it waits for seconds."""
WAIT = 60.0
"""Seconds to wait for a stage that must not run meanwhile."""
WRITERS = {**dict.fromkeys(SHARDED, "ingest"), "selection": "select"}
"""Tables whose former or unpublished shards may be published again, and by whom."""


@dataclass(frozen=True)
class Heap:
    """Objects of one folder that nobody needs.

    `find` finds them below `place`. `writer`: the lease of a stage that must not run while they are
    deleted; None if none would mind.
    """

    place: Place
    find: Callable[[], list[Found]]
    writer: Place | None = None

    def remove(self, found: Collection[Found]) -> int:
        """Delete these, except those that were written again or are needed by now; returns how many
        were deleted. Raises ValueError if the writer is at work.
        """
        left, removed = list(found), 0
        while left:
            batch, left = left[:BATCH], left[BATCH:]
            with lease(self.writer, WAIT) if self.writer else nullcontext() as held:
                now = {(one.name, one.modified) for one in self.find()}
                doomed = [one.name for one in batch if (one.name, one.modified) in now]
                if held:
                    held.check()
                self.place.delete(doomed)
                removed += len(doomed)
        return removed


def heaps(cfg: Config, kept: Mapping[str, set[int]]) -> Iterator[Heap]:
    """Every heap of a run. kept: versions of its tables whose files stay (jobs/upkeep/pins.py)."""
    days = cfg.gc.days
    for name in TABLES:
        table = cfg.table(name)
        writer = cfg.place("leases", WRITERS[name]) if name in WRITERS else None
        find = partial(unneeded, table, days, kept.get(name, ()))
        yield Heap(table.place, find, writer)
    index = cfg.table("feature_index")
    for key in cfg.place("features").folders():
        place, writer = cfg.place("features", key), cfg.place("leases", f"harvest-{key}")
        find = partial(unlisted, place, index, days, kept.get("feature_index", ()))
        yield Heap(place, find, writer)
    markers, writer = cfg.place("ingesting"), cfg.place("leases", "ingest")
    yield Heap(markers, partial(_old_markers, cfg, markers), writer)
    if cfg.place().is_local:
        yield Heap(cfg.place(), partial(_partial, cfg.place(), days))


def scratch_heaps(cfg: Config) -> Iterator[Heap]:
    """Copies in the scratch folder that are made anew where they are missing."""
    for name in ("training_data", "fetched", "logs_read"):
        place = Place(str(cfg.path(name)))
        yield Heap(place, partial(_old_copies, place, cfg.gc.days))


def regression(cfg: Config) -> Config:
    """The inner run with the features of regression sets (jobs/evaluation/regression_sets.py)."""
    return replace(cfg, work=str(cfg.place("regression")), scratch=str(cfg.path("regression")))


def unlisted(place: Place, index: Table, days: float, keep: Collection[int]) -> list[Found]:
    """Old files of a feature cache that neither the latest version of feature_index names, nor one
    of `keep`.
    """
    old = _old(place, days)
    if not old:
        return []
    named: set[str] = set()
    latest = index.version()
    for version in {latest, *(v for v in keep if latest is not None and v <= latest)}:
        where = pc.field("features_key") == place.name
        for batch in index.batches(["file"], where, version):
            named.update(batch["file"].unique().to_pylist())
    # A reader's mark of damage is for the next harvest.
    return [one for one in old if one.name not in named and not one.name.startswith(".")]


def _old_markers(cfg: Config, markers: Place) -> list[Found]:
    """Old markers of interrupted ingests, but for those that still say whose rows a table has."""
    old = _old(markers, cfg.gc.days)
    if not old:
        return []
    published = set(cfg.table("logs").read(["log"])["log"].to_pylist())
    live = [s for name in SHARDED for s in cfg.table(name).shards().values()]

    def speaks(key: str) -> bool:
        return key not in published and any(shard.may_have("log", [key]) for shard in live)

    return [one for one in old if not speaks(one.name.removesuffix(".json"))]


def _partial(place: Place, days: float) -> list[Found]:
    """Old files that killed writers of objects left on a local disk: obstore names them NAME#1, and
    hides them.
    """
    found = []
    for name in (*TABLES, "features", "ingesting"):
        for path in (place / name).path.rglob("*#*"):
            if not re.search(r"#\d+$", path.name):
                continue
            with suppress(FileNotFoundError):  # its writer was alive
                size, modified = path.stat().st_size, _modified(path)
                if modified < _before(days):
                    found.append(Found(path.relative_to(place.path).as_posix(), size, modified, ""))
    return found


def _modified(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)


def _old(place: Place, days: float) -> list[Found]:
    return [found for found in place.objects() if found.modified < _before(days)]


def _old_copies(place: Place, days: float) -> list[Found]:
    """Old entries of a scratch folder, each with everything that belongs to it (.NAME.json), the
    latter first: a copy without it is made anew.
    """
    entries: dict[str, list[Found]] = {}
    for found in place.objects():
        entries.setdefault(_entry(found.name), []).append(found)
    old = [
        found
        for members in entries.values()
        if max(found.modified for found in members) < _before(days)
        for found in members
    ]
    return sorted(old, key=lambda found: (not found.name.startswith("."), found.name))


def _entry(name: str) -> str:
    first = name.partition("/")[0]
    return first[1:].removesuffix(".json") if first.startswith(".") else first


def _before(days: float) -> datetime:
    return datetime.now(UTC) - timedelta(days=days)
