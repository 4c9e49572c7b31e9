"""Which samples a training run learns from (its pin), and which run a command is about.

When a run begins, it writes the selected samples to its pin,
<work>/runs/<name>/pin-<recipe>.parquet. Its workers, restarted workers and the same command on
another day read the pin, so a later selection changes nothing. The pin has ids, domains,
temperatures and supervised spans, but no tokens: what is deleted from traffic/ must be gone. A run
that needs deleted samples cannot go on. It also names the versions of the tables that it was made
from.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dflash.checkpoint import drafter_sha256
from dflash.drafter_config import DrafterConfig
from dflash.identity import target_id
from jobs.base.config import Config
from jobs.base.settings import split_identity
from jobs.dataset.samples import (
    at_one_selection,
    captured_top_k,
    harvested,
    none_of_target,
    selected,
    selection_version,
    set_aside,
    usable,
    with_tokens,
)
from jobs.training.mapped import not_in_traffic
from jobs.training.states import find_states, is_unfinished, products
from store.feature_index import check_all_harvested
from store.ids import short_hash
from store.lease import Lease, lease

DECIDING = ("sample_id", "split", "domain", "temperature", "loss_mask")
"""Columns of a pin that decide what a run learns."""
PINNED = (*DECIDING, "conversation_id", "captured_at", "prompt_tokens", "output_tokens")
VERSIONS = b"flywheel.versions"


@dataclass(frozen=True)
class Pin:
    """The samples of a run: SELECTION rows of the splits train and val, in sample_id order, and the
    versions of the tables that they came from.
    """

    rows: pa.Table
    versions: dict[str, int | None]

    @property
    def train(self) -> pa.Table:
        """The rows that are learned from."""
        return self.rows.filter(pc.field("split") == "train")

    @property
    def val(self) -> pa.Table:
        """The rows that choose the weights."""
        return self.rows.filter(pc.field("split") == "val")

    @property
    def key(self) -> str:
        """A hash of the columns DECIDING, the same wherever it is computed."""
        digest = hashlib.sha256()
        for name in DECIDING:
            for part in _parts(self.rows[name]):
                digest.update(f"{name} {len(part)}:".encode() + part)
        return digest.hexdigest()[:16]


def _parts(column: pa.ChunkedArray) -> Iterator[bytes]:
    """A column of a pin as bytes that do not depend on how Arrow divides it."""
    if pa.types.is_list(column.type):
        spans = column.combine_chunks()
        yield pc.list_value_length(spans).to_numpy(zero_copy_only=False).tobytes()  # pyright: ignore[reportAttributeAccessIssue]
        for end in ("start", "end"):
            yield pc.struct_field(spans.flatten(), end).to_numpy(zero_copy_only=False).tobytes()  # pyright: ignore[reportAttributeAccessIssue]
    elif pa.types.is_string(column.type):
        yield json.dumps(column.to_pylist()).encode()
    else:
        yield column.to_numpy().astype(np.float64).tobytes()


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
    begun = products(cfg, name).has(_file(recipe))
    if begun or cfg.place("drafters", name).has("config.json"):
        return Chosen(name, read_pin(cfg, name, shape) if begun else now)
    note = ""
    for other in [] if cfg.train.fresh else _unfinished(cfg, recipe):
        pin = read_pin(cfg, other, shape)
        if lost := missing(cfg, pin):
            note = f"run {other} is unfinished and cannot go on ({lost}); {name} starts anew"
            continue
        known = pin.rows["sample_id"].combine_chunks()
        newer = now.rows.filter(~pc.field("sample_id").isin(known)).num_rows
        note = (
            f"run {other} with {len(pin.train)} training samples is unfinished and goes on; "
            f"{newer} samples have been selected since (train.fresh=true starts a run with them)"
        )
        return Chosen(other, pin, newer, note)
    return Chosen(name, now, note=note)


def _file(recipe: str) -> str:
    return f"pin-{recipe}.parquet"


def _unfinished(cfg: Config, recipe: str) -> list[str]:
    """Names of this recipe's runs that were interrupted after a first state, the latest first."""
    files = [f.name.split("/") for f in cfg.place("runs").objects()]
    runs = [parts[0] for parts in files if parts[1:] == [_file(recipe)]]
    states = {name: find_states(cfg, name) for name in runs if is_unfinished(cfg, name)}
    begun = {name: max(found.values()) for name, found in states.items() if found}
    return sorted(begun, key=lambda name: begun[name], reverse=True)


def live_pin(cfg: Config) -> Pin:
    """The pin of a run that begins now. Raises ValueError without training samples."""
    cfg = at_one_selection(cfg)
    versions = {
        name: cfg.table(name).version() for name in ("traffic", "feature_index", "set_aside")
    }
    rows = usable(cfg, selected(cfg)).filter(pc.field("split") != "test").select(list(PINNED))
    pin = Pin(rows, {"selection": selection_version(cfg), **versions})
    if not pin.train.num_rows:
        raise none_of_target(
            cfg, "training sample", "run `flywheel ingest` and `flywheel select` with more traffic"
        )
    return pin


def run_name(cfg: Config, shape: DrafterConfig, pin: Pin) -> str:
    """`drafter-<hash>` of everything that decides the result: target, samples with their domains
    and supervised spans, shape, weights of the base, settings.

    How it is executed (workers, device, ...) is left out: a run may be resumed with other values.
    """
    parts = [target_id(cfg.target_path), pin.key, shape.shape_fields(), run_settings(cfg)]
    return f"drafter-{short_hash(parts)[:12]}"


def run_recipe(cfg: Config, shape: DrafterConfig) -> str:
    """A hash as in `run_name`, without the samples: runs of one recipe differ only in those."""
    return short_hash([target_id(cfg.target_path), shape.shape_fields(), run_settings(cfg)])[:12]


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
    metadata = {VERSIONS: json.dumps(chosen.pin.versions).encode()}
    sink = pa.BufferOutputStream()
    pq.write_table(chosen.pin.rows.replace_schema_metadata(metadata), sink, compression="zstd")
    file = _file(run_recipe(cfg, shape))
    products(cfg, chosen.name).create(file, sink.getvalue().to_pybytes())


def read_pin(cfg: Config, name: str, shape: DrafterConfig) -> Pin:
    """The pin of the run `name`. Raises ValueError if it is damaged: its hash is not that name."""
    place, file = products(cfg, name), _file(run_recipe(cfg, shape))
    try:
        rows = pq.read_table(place.open(file))
        pin = Pin(rows, json.loads((rows.schema.metadata or {})[VERSIONS]))
        damage = "" if run_name(cfg, shape, pin) == name else f"it is not the pin of {name}"
    except (pa.ArrowInvalid, KeyError, ValueError) as error:
        damage, pin = str(error), None
    if damage or pin is None:
        raise ValueError(
            f"{place}/{file} is damaged ({damage}): move the run's folder away, and the same "
            "command begins it anew"
        )
    return pin


def learned(cfg: Config, name: str) -> set[str]:
    """Ids of the training samples that the run `name` is pinned to; empty for a drafter that was
    trained elsewhere.
    """
    place = products(cfg, name)
    found: set[str] = set()
    for item in place.objects():
        if item.name.startswith("pin-"):
            rows = pq.read_table(place.open(item.name), columns=["sample_id", "split"])
            found.update(rows.filter(pc.field("split") == "train")["sample_id"].to_pylist())
    return found


def missing(cfg: Config, pin: Pin) -> str:
    """Which samples or features of a pinned run are missing now, in words; "" if none are."""
    wanted = set(pin.rows["sample_id"].to_pylist())
    if aside := sorted(set_aside(cfg) & wanted):
        return f"{len(aside)} of its samples are set aside now, for instance {aside[0]}"
    batches = with_tokens(cfg, pin.rows, [])
    there = {name for batch in batches for name in batch["sample_id"].to_pylist()}
    if gone := sorted(wanted - there):
        return not_in_traffic(gone)
    try:
        check_all_harvested(harvested(cfg, wanted)["sample_id"].to_pylist(), wanted)
    except ValueError as error:
        return str(error)
    return ""


@contextmanager
def only_one(cfg: Config, name: str) -> Iterator[Lease]:
    """Be the only command, on any host, that trains this run: two would write the same states and
    metrics. Raises ValueError if another one trains it.
    """
    with ExitStack() as stack:
        try:
            held = stack.enter_context(lease(cfg.place("leases", f"train-{name}"), wait=0.0))
        except ValueError as error:
            raise ValueError(f"run {name} is being trained by another command: {error}") from error
        yield held
