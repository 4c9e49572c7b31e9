"""Which samples a training run learns from (its pin), and which run a command is about.

When a run begins, it writes the samples that it found in traffic/ to its pin,
<work>/runs/<name>/pin-<recipe>.json. Its workers, restarted workers and the same command on another
day read the pin, so traffic that arrives later changes nothing. The pin has ids, domains,
temperatures and supervised spans, but no tokens: what is deleted from traffic/ must be gone. A run
that needs deleted samples cannot go on.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dflash.checkpoint import drafter_sha256
from dflash.drafter_config import DrafterConfig
from dflash.identity import target_id
from jobs.base.config import Config
from jobs.base.settings import split_identity
from jobs.dataset.samples import captured_top_k, features_folder, none_of_target, set_aside
from jobs.registry.alias_lock import who
from jobs.training.states import is_unfinished, newest_state, states_folder
from store.features import check_all_harvested
from store.files import commit, exclusive, read_json
from store.ids import short_hash
from store.schemas import features_columns
from store.shards import read_dataset, shard_paths
from store.traffic_table import read_traffic

PinnedRow = Sequence[Any]
"""[sample_id, domain, temperature, supervised spans [[start, end], ...]]."""


@dataclass(frozen=True)
class Pin:
    """Samples in sample_id order, and the names of the feature files that had them.

    Those files are preferred, not required: features are a cache. If they are harvested again, they
    are the same up to rounding.
    """

    train: Sequence[PinnedRow]
    val: Sequence[PinnedRow]
    files: Sequence[str]

    def ids(self) -> list[str]:
        """Every sample of the run."""
        return [row[0] for row in (*self.train, *self.val)]


@dataclass(frozen=True)
class Chosen:
    """The run that a command is about, and a note for the user about how it was chosen."""

    name: str
    pin: Pin
    newer: int = 0
    """If an unfinished run is continued: samples that have arrived since it began."""
    note: str = ""


def choose_run(cfg: Config, shape: DrafterConfig) -> Chosen:
    """The run to train. It is the run of today's traffic if that has begun. Otherwise an unfinished
    run of the same target, shape and settings is continued, unless train.fresh: new traffic must
    not make its work useless. Without one, the run of today's traffic is new.

    Raises ValueError without training samples.
    """
    now = live_pin(cfg)
    name, recipe = run_name(cfg, shape, now), run_recipe(cfg, shape)
    begun = states_folder(cfg, name) / f"pin-{recipe}.json"
    if cfg.path("drafters", name, "config.json").is_file() or begun.is_file():
        return Chosen(name, read_pin(cfg, name, shape) if begun.is_file() else now)
    note = ""
    for folder in [] if cfg.train.fresh else _unfinished(cfg, recipe):
        pin = read_pin(cfg, folder.name, shape)
        if lost := missing(cfg, pin):
            note = f"run {folder.name} is unfinished and cannot go on ({lost}); {name} starts anew"
            continue
        newer = len(set(now.ids()) - set(pin.ids()))
        note = (
            f"run {folder.name} with {len(pin.train)} training samples is unfinished and goes on; "
            f"{newer} samples have arrived since (train.fresh=true starts a run with them)"
        )
        return Chosen(folder.name, pin, newer, note)
    return Chosen(name, now, note=note)


def _unfinished(cfg: Config, recipe: str) -> list[Path]:
    """Folders of this recipe's runs that were interrupted after a first state, the latest first."""
    folders = [path.parent for path in cfg.path("runs").glob(f"*/pin-{recipe}.json")]
    states = {folder: newest_state(folder) for folder in folders if is_unfinished(cfg, folder.name)}
    begun = {folder: path.stat().st_mtime for folder, path in states.items() if path is not None}
    return sorted(begun, key=begun.__getitem__, reverse=True)


def live_pin(cfg: Config) -> Pin:
    """The pin of a run that begins now. Raises ValueError without training samples."""
    identity = target_id(cfg.target_path)
    train, val = (_pinned(cfg, identity, split) for split in ("train", "val"))
    if not train:
        raise none_of_target(
            cfg, "training sample", "run `flywheel ingest` with more conversations"
        )
    return Pin(train, val, [path.name for path in shard_paths(features_folder(cfg, identity))])


def _pinned(cfg: Config, identity: str, split: str) -> list[PinnedRow]:
    table = read_traffic(cfg.path("traffic"), identity, split)
    table, aside = table.select(["sample_id", "domain", "temperature", "loss_mask"]), set_aside(cfg)
    return [
        [row["sample_id"], row["domain"], row["temperature"], _spans(row)]
        for batch in table.to_batches(max_chunksize=1024)
        for row in batch.to_pylist()
        if row["sample_id"] not in aside
    ]


def _spans(row: dict[str, Any]) -> list[list[int]]:
    return [[span["start"], span["end"]] for span in row["loss_mask"]]


def run_name(cfg: Config, shape: DrafterConfig, pin: Pin) -> str:
    """`drafter-<hash>` of everything that decides the result: target, samples with their domains
    and supervised spans, shape, weights of the base, settings.

    How it is executed (workers, device, ...) is left out: a run may be resumed with other values.
    """
    parts = [target_id(cfg.target_path), pin.train, pin.val, asdict(shape), run_settings(cfg)]
    return f"drafter-{short_hash(parts)[:12]}"


def run_recipe(cfg: Config, shape: DrafterConfig) -> str:
    """A hash as in `run_name`, without the samples: runs of one recipe differ only in those."""
    return short_hash([target_id(cfg.target_path), asdict(shape), run_settings(cfg)])[:12]


def run_settings(cfg: Config) -> dict[str, Any]:
    """The settings that decide the result. train.base counts by its content, not by its path."""
    settings = split_identity(cfg.train)[0]
    settings |= {"target_dtype": cfg.target.dtype, "top_k": captured_top_k(cfg)}
    settings |= {"features": cfg.harvest.features}
    if cfg.train.base:
        settings["base"] = drafter_sha256(cfg.train.base)
    return settings


def write_pin(cfg: Config, chosen: Chosen, shape: DrafterConfig) -> None:
    """Write the pin of a run that begins; an existing pin is kept."""
    path = states_folder(cfg, chosen.name) / f"pin-{run_recipe(cfg, shape)}.json"
    data = json.dumps(asdict(chosen.pin)).encode()
    commit(path, lambda stream: stream.write(data), overwrite=False)


def read_pin(cfg: Config, name: str, shape: DrafterConfig) -> Pin:
    """The pin of the run `name`. Raises ValueError if it is damaged: its hash is not that name."""
    path = states_folder(cfg, name) / f"pin-{run_recipe(cfg, shape)}.json"
    fix = "move the run's folder away, and the same command begins it anew"
    found = read_json(path, ["train", "val", "files"], fix)
    pin = Pin(**found)
    if run_name(cfg, shape, pin) != name:
        raise ValueError(f"{path} is damaged (it is not the pin of {name}): {fix}")
    return pin


def learned(cfg: Config, name: str) -> set[str]:
    """Ids of the training samples that the run `name` is pinned to; empty for a drafter that was
    trained elsewhere.
    """
    pins = states_folder(cfg, name).glob("pin-*.json")
    return {row[0] for pin in pins for row in read_json(pin, ["train"])["train"]}


def missing(cfg: Config, pin: Pin) -> str:
    """Which samples or features of a pinned run are missing now, in words; "" if none are."""
    wanted, identity = pin.ids(), target_id(cfg.target_path)
    if aside := sorted(set_aside(cfg).intersection(wanted)):
        return f"{len(aside)} of its samples are set aside now, for instance {aside[0]}"
    table = read_traffic(cfg.path("traffic"), identity)
    if gone := sorted(set(wanted).difference(table["sample_id"].to_pylist())):
        return f"{len(gone)} of its samples are not in traffic/ any more, for instance {gone[0]}"
    folder, columns = features_folder(cfg, identity), features_columns(cfg.harvest.top_k)
    known = set(read_dataset(folder, columns, columns=["sample_id"])["sample_id"].to_pylist())
    try:
        check_all_harvested(known, wanted)
    except ValueError as error:
        return str(error)
    return ""


def pinned_rows(
    cfg: Config, pinned: Sequence[PinnedRow], columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """TRAFFIC rows of pinned samples, in the order of the pin: these columns and what the pin has.
    Only a few rows at a time are Python lists. Raises ValueError if a sample is gone.
    """
    table = read_traffic(cfg.path("traffic"), target_id(cfg.target_path))
    table = table.select(["sample_id", *columns])
    names = pa.array([row[0] for row in pinned], pa.string())
    table = table.filter(pc.field("sample_id").isin(names))
    if len(table) < len(pinned):
        raise ValueError(
            f"{len(pinned) - len(table)} of {len(pinned)} samples of this run are not in "
            f"{cfg.path('traffic')} any more: run `flywheel train` again, which starts a new one"
        )
    waiting = iter(pinned)
    for batch in table.to_batches(max_chunksize=1024):
        for row in batch.to_pylist():
            name, domain, temperature, spans = next(waiting)
            assert row["sample_id"] == name, "pins and traffic are in sample_id order"
            mask = [{"start": start, "end": end} for start, end in spans]
            yield row | {"domain": domain, "temperature": temperature, "loss_mask": mask}


@contextmanager
def only_one(cfg: Config, name: str) -> Iterator[None]:
    """Be the only command that trains this run: two would write the same states and metrics. Raises
    ValueError if another one trains it.
    """
    path = cfg.path("runs", f".{name}.lock")
    with exclusive(path, f"{who()}, process {os.getpid()}") as other:
        if other:
            raise ValueError(
                f"run {name} is being trained by {other} (lock {path}): wait for it to end, or "
                "stop it"
            )
        yield
