"""flywheel migrate

Brings a local work folder of an earlier release to today's layout, once. The rows of its shards are
copied into tables, its features are listed where they are, and training pins are written anew. The
former manifests and records are moved to <work>/former at the end. The former shards stay until
`flywheel gc` removes them. If it is interrupted, the same command begins anew.
"""

import os
from pathlib import Path
from typing import Any

from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.upkeep import former_products as former
from jobs.upkeep.garbage import regression
from store.former_layout import is_former
from store.lease import lease

KEPT = "former"
"""Folder of what was moved away."""
MOVES = {
    "rejects": former.move_rejects,
    "set_aside": former.move_set_aside,
    "acceptance": former.move_acceptance,
    "promotions": former.move_promotions,
    "feature_index": former.move_features,
    "training pins": former.move_pins,
    "traffic": former.move_traffic,
}


def run(cfg: Config) -> dict[str, Any]:
    """Migrate; returns how many rows each table got.

    Raises ValueError for a work folder in a bucket, which never had another layout, and for a shard
    or record of the former layout that is damaged.
    """
    if not cfg.place().is_local:
        raise ValueError(f"{cfg.place()} is in a bucket: earlier releases had none, nothing to do")
    with lease(cfg.place("leases", "migrate"), wait=0.0):
        found = _migrate(cfg)
        _migrate(regression(cfg))
    print_table("Migrated", ["what", "rows"], [[name, rows] for name, rows in found.items()])
    if found["traffic"]:
        console.print(
            f"the former records are in {cfg.place(KEPT)}; `flywheel gc` removes the former shards "
            "when they are older than gc.days; next: `flywheel select`"
        )
    return {"stage": "migrate", "rows": found}


def _migrate(cfg: Config) -> dict[str, int]:
    work, kept = cfg.place().path, cfg.place(KEPT).path
    found = dict.fromkeys(MOVES, 0)
    # The list of traffic is moved last. While it is there, no stage has used the tables; after a
    # rollback there are none. Copying twice writes the same rows.
    if is_former(work) or not _records(kept):
        _move(kept, work)
        found = {name: move(cfg) for name, move in MOVES.items()}
    _move(work, kept)
    return found


def _move(source: Path, target: Path) -> None:
    for path in _records(source):
        there = target / path.relative_to(source)
        if there.exists():
            raise ValueError(f"{path} and {there}: remove the older one, then run this again")
        there.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, there)


def _records(work: Path) -> list[Path]:
    """What said what was in force; traffic/manifests last, because it tells the former layout."""
    found = [
        *work.glob("runs/*/pin-*.json"),
        *work.glob("promotions/[0-9]*.json"),
        *work.glob("features/*/seen.json"),
        *work.glob("features/*/manifests"),
        *(work / name / "manifests" for name in ("rejects", "set_aside", "acceptance", "traffic")),
    ]
    return [path for path in found if path.exists()]


if __name__ == "__main__":
    run_as_module("migrate")
