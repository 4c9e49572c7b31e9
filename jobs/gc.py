"""flywheel gc [--plan] [gc.days=7]

Keeps a work folder small. What is needed is not touched: the latest version of each table, versions
that a training run is pinned to, and what was in use or written less than gc.days ago.

First the small shards of each table are put together. Then files are removed that no such version
needs: those of older versions, and what interrupted commands left. Stages may run meanwhile. With
--plan it says what would be done, and changes nothing.
"""

from typing import Any

from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.upkeep.garbage import Heap, heaps, regression, scratch_heaps
from jobs.upkeep.pins import kept_versions
from store.collect import compact, small_shards
from store.lease import held_leases, lease
from store.place import Found
from store.schemas import TABLES
from store.tables import Table

MIB = 1 << 20
Garbage = list[tuple[Heap, list[Found]]]


def plan(cfg: Config) -> dict[str, Any]:
    """What `run` would do; changes nothing."""
    scattered = _scattered(cfg)
    _show_small([[_name(t), n, size / MIB, "would be put together"] for t, n, size in scattered])
    garbage = _garbage(cfg)
    _show(garbage, "would be removed")
    return {"stage": "gc", "plan": True, **_sums(garbage), "small": _names(scattered)}


def run(cfg: Config) -> dict[str, Any]:
    """Compact, then remove; returns the summary.

    Raises ValueError if gc.days is 0 while a stage holds a lease, if another gc is running, and for
    a pin of a training run that is damaged.
    """
    _check_days(cfg)
    with lease(cfg.place("leases", "gc"), wait=0.0):
        scattered = _scattered(cfg)
        _show_small([[_name(t), n, size / MIB, _compacted(t)] for t, n, size in scattered])
        garbage = _garbage(cfg)
        _show(garbage, "is removed")
        left = [note for heap, found in garbage if (note := _remove(heap, found))]
    for note in left:
        console.print(f"note: {note}")
    return {"stage": "gc", **_sums(garbage), "left": left, "small": _names(scattered)}


def _check_days(cfg: Config) -> None:
    held = [name for one in _runs(cfg) for name in held_leases(one.place("leases"))]
    if cfg.gc.days < 1 and held:
        raise ValueError(
            f"gc.days=0 removes what a running command has just written, and {', '.join(held)} "
            "runs: wait for its end, or set gc.days to 1 or more"
        )


def _runs(cfg: Config) -> tuple[Config, Config]:
    return cfg, regression(cfg)


def _scattered(cfg: Config) -> list[tuple[Table, int, int]]:
    """(table, number of its small shards, their bytes) of tables that have too many of them."""
    tables = [one.table(name) for one in _runs(cfg) for name in TABLES]
    found = [(table, small_shards(table.shards().values())) for table in tables]
    return [(table, len(s), sum(one.bytes for one in s)) for table, s in found if s]


def _compacted(table: Table) -> str:
    if compact(table):
        return f"now {len(table.shards())} shards"
    return "left for the next gc: other writers take them away"


def _garbage(cfg: Config) -> Garbage:
    found = [*heaps(cfg, kept_versions(cfg)), *heaps(regression(cfg), {}), *scratch_heaps(cfg)]
    return [(heap, there) for heap in found if (there := heap.find())]


def _show_small(rows: list[list[Any]]) -> None:
    if rows:
        print_table("Small shards", ["table", "shards", "MiB", ""], rows)
    else:
        console.print("no table has many small shards")


def _show(garbage: Garbage, title: str) -> None:
    if not garbage:
        console.print(f"nothing {title}")
        return
    rows = [
        [str(heap.place), len(found), _bytes(found) / MIB, found[0].name] for heap, found in garbage
    ]
    print_table(f"What {title}", ["place", "files", "MiB", "for instance"], rows)


def _remove(heap: Heap, found: list[Found]) -> str:
    """Remove a heap; why it could not be removed, else ""."""
    try:
        heap.remove(found)
    except ValueError as error:
        return f"{heap.place} is left for the next gc: {error}"
    return ""


def _sums(garbage: Garbage) -> dict[str, int]:
    found = [one for _, objects in garbage for one in objects]
    return {"files": len(found), "bytes": _bytes(found)}


def _bytes(found: list[Found]) -> int:
    return sum(one.size for one in found)


def _name(table: Table) -> str:
    return str(table.place)


def _names(scattered: list[tuple[Table, int, int]]) -> dict[str, int]:
    return {_name(table): shards for table, shards, _ in scattered}


if __name__ == "__main__":
    run_as_module("gc")
