"""flywheel cache [--plan] [cache.gib=200] [cache.days=30]

Keeps the feature cache, <work>/features, within its size and age. Features can be computed again,
so anything may go but what is needed now: the samples of the selection under the configured taps,
and those of training runs that can go on. Expired files go first, then the oldest until the rest
fits. With --plan it says what would go, and changes nothing.
"""

from collections.abc import Collection, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.upkeep.feature_files import FeatureFile, evicted, feature_files
from store.lease import Lease, lease

GIB = 2**30
WAIT = 60.0
"""Seconds to wait for a harvest."""


def plan(cfg: Config) -> dict[str, Any]:
    """What `run` would do; changes nothing."""
    files = feature_files(cfg)
    gone = _excess(cfg, files)
    return _summary(cfg, [file for file in files if file not in gone], gone) | {"plan": True}


def run(cfg: Config) -> dict[str, Any]:
    """Evict what exceeds the limits; returns the summary.

    Raises ValueError if another cache or a harvest of these features is running.
    """
    gone: set[FeatureFile] = set()
    with lease(cfg.place("leases", "cache"), wait=0.0):
        for key in sorted({file.key for file in _excess(cfg, feature_files(cfg))}):
            # A harvest lists the files that it finds, and these are about to be deleted.
            with lease(cfg.place("leases", f"harvest-{key}"), WAIT) as held:
                # Decided again: the harvest that we waited for may have reused some.
                mine = {file for file in _excess(cfg, feature_files(cfg)) if file.key == key}
                _evict(cfg, key, sorted(file.name for file in mine), held)
                gone |= mine
    return _summary(cfg, feature_files(cfg), gone)


def _excess(cfg: Config, files: list[FeatureFile]) -> set[FeatureFile]:
    """Which of `files` exceed the limits."""
    days = cfg.cache.days
    return evicted(files, cfg.cache.gib, datetime.now(UTC) - timedelta(days=days) if days else None)


def _evict(cfg: Config, key: str, names: list[str], held: Lease) -> None:
    if names:
        held.check()
        cfg.table("feature_index").replace("file", names, [])
        cfg.place("features", key).delete(names)


def _summary(cfg: Config, left: list[FeatureFile], gone: Collection[FeatureFile]) -> dict[str, Any]:
    """What stays and what goes; prints it, too."""
    _show([*left, *gone], gone)
    needed = _bytes(file for file in left if file.needed)
    if 0 < cfg.cache.gib * GIB < needed:
        console.print(
            f"note: the selection and unfinished training runs need {needed / GIB:.4g} GiB, more "
            f"than cache.gib={cfg.cache.gib:g}: raise it, or lower the budgets of `flywheel select`"
        )
    summary = {"stage": "cache", "files": len(left), "bytes": _bytes(left), "needed": needed}
    return summary | {"evicted": len(gone), "evicted_bytes": _bytes(gone)}


def _show(files: list[FeatureFile], gone: Collection[FeatureFile]) -> None:
    rows = []
    for key in sorted({file.key for file in files}):
        mine = [file for file in files if file.key == key]
        parts = [mine, [f for f in mine if f.needed], [f for f in mine if f in gone]]
        newest = max(file.harvested_at for file in mine)
        sizes = [_bytes(part) / GIB for part in parts]
        rows.append([key, sum(file.samples for file in mine), f"{newest:%Y-%m-%d %H:%M}", *sizes])
    columns = ["features", "samples", "newest", "GiB", "GiB needed", "GiB evicted"]
    print_table("Feature cache", columns, rows)


def _bytes(files: Iterable[FeatureFile]) -> int:
    return sum(file.bytes for file in files)


if __name__ == "__main__":
    run_as_module("cache")
