"""Drafter folders on the local disk, wherever they are kept."""

from pathlib import Path

from jobs.base.config import Config
from store.place import place_of

MARK = "config.json"
"""The file that is written last: a folder that has it is complete."""


def local_folder(cfg: Config, named: str) -> Path:
    """A folder that a user named by its path or URL; of a bucket, a copy in the scratch folder."""
    return place_of(named).fetch(cfg.path("fetched"))


def newest_drafter(cfg: Config) -> Path | None:
    """The folder of the latest drafter in <work>/drafters; None without one."""
    place = cfg.place("drafters")
    found = [
        item
        for item in place.objects()
        if item.name.endswith(f"/{MARK}") and item.name.count("/") == 1 and item.name[0] != "."
    ]
    if not found:
        return None
    newest = max(found, key=lambda item: item.modified)
    return (place / newest.name.partition("/")[0]).fetch(cfg.path("fetched"))


def with_local_base(cfg: Config) -> Config:
    """These settings with train.base on the local disk."""
    if "://" not in cfg.train.base:
        return cfg
    return cfg.override("train", base=str(local_folder(cfg, cfg.train.base)))
