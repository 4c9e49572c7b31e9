"""The drafters of a comparison, loaded on the device of this process, and what they read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dflash.checkpoint import drafter_sha256, load_drafter, read_config
from dflash.model import Drafter
from dflash.target_model import load_borrowed
from jobs.base.config import Config
from jobs.base.console import console
from jobs.base.devices import compute_device, compute_dtype
from jobs.base.drafter_folders import local_folder, newest_drafter
from jobs.base.drafter_shape import misfits
from jobs.base.target_facts import target_taps
from jobs.dataset.samples import Requests, load_rows, none_of_target, set_aside, with_features
from jobs.dataset.slices import Row
from jobs.registry.versions import resolve

Borrowed = tuple[Tensor, Tensor]
"""The target's embedding and head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the drafters that are compared."""

    folder: Path
    drafter: Drafter
    version: str | None = None  # in the registry

    @property
    def taps(self) -> tuple[int, ...]:
        """The target layers that it reads."""
        return self.drafter.cfg.target_layer_ids

    @property
    def k(self) -> int:
        """Drafts per round: as many as its block holds."""
        return self.drafter.cfg.num_drafts


def baseline_side(cfg: Config, folder: Path, borrowed: Borrowed) -> Side | None:
    """evaluate.baseline, else the champion; None if `folder` is the champion, if the champion is
    for a target of another shape, or if there is none.
    """
    named = cfg.evaluate.baseline
    version, base = None, local_folder(cfg, named) if named else None
    if base is None:
        champion = resolve(cfg, "champion")
        if champion is None or drafter_sha256(champion[1]) == drafter_sha256(folder):
            return None
        version, base = champion
        wrong = misfits(cfg, read_config(base)).keys() - {"target_layer_ids"}
        if wrong:
            told = f"champion {version} has another {min(wrong)} than this target"
            console.print(f"note: {told}: it is not compared with")
            return None
    check_shape(cfg, base)
    return Side(folder=base, drafter=drafter_on(base, borrowed), version=version)


def check_shape(cfg: Config, folder: Path) -> None:
    """Raise ValueError unless the drafter fits the shape of this target; its taps may be any."""
    for name, (has, needed) in misfits(cfg, read_config(folder)).items():
        if name != "target_layer_ids":
            raise ValueError(
                f"drafter {folder}: {name} is {has}, but target {cfg.target_path} has {needed}: "
                "this drafter is for another target"
            )


def load_on(cfg: Config) -> Borrowed:
    """The target's embedding and head, in the dtype and on the device of this process."""
    embedding, head = load_borrowed(cfg.target_path, compute_dtype(cfg))
    embedding_there = embedding.to(compute_device(cfg))
    return embedding_there, embedding_there if head is embedding else head.to(compute_device(cfg))


def drafter_on(folder: Path, borrowed: Borrowed) -> Drafter:
    """A drafter in the dtype and on the device of the embedding and head that it borrows."""
    return load_drafter(folder, borrowed[0].dtype).to(borrowed[0].device)


def held_out(cfg: Config, sides: Sequence[Side]) -> list[Row]:
    """Rows of evaluate.split, greedy and sampled, that are set aside under no side's taps: a gain
    is measured on pairs. Raises ValueError if none of them has a round.
    """
    aside = set().union(*(set_aside(cfg, side.taps) for side in sides))
    rows = [
        row
        for row in load_rows(cfg, cfg.evaluate.split, sampled=True)
        if row["sample_id"] not in aside
    ]
    if not any(len(row["output_ids"]) > 1 for row in rows):
        fix = "ingest more conversations or set evaluate.split"
        raise none_of_target(cfg, f"{cfg.evaluate.split} sample", fix)
    return rows


def features_of(cfg: Config, side: Side, rows: list[Row]) -> Requests:
    """Requests with the features of a side's taps. Raises ValueError that says how to get them."""
    try:
        return with_features(cfg, rows, side.taps)
    except ValueError as error:
        if side.taps == target_taps(cfg):
            raise
        command = "`flywheel harvest drafter.taps=" + ",".join(map(str, side.taps)) + "`"
        told = str(error).replace("`flywheel harvest`", command)
        raise ValueError(
            f"drafter {side.folder} reads other target layers than drafter.taps names: {told}"
            + ("" if command in told else f"; its features come from {command}")
        ) from error


def find_drafter(cfg: Config, named: str) -> Path:
    """The drafter folder `named`, else the newest in <work>/drafters; ValueError without one."""
    if named:
        return local_folder(cfg, named)
    found = newest_drafter(cfg)
    if found is None:
        raise ValueError(f"no drafter in {cfg.place('drafters')}: run `flywheel train` first")
    return found
