"""flywheel train [--plan] [train.steps=400] [train.base=FOLDER] [train.workers=2]

Traffic + features -> <work>/drafters/<run name>, a folder that vLLM serves. Runs on Ray Train. The
run's name is a hash of its data and settings, so the same command finds its result again. An
interrupted run is finished on the samples that it began with. The exported weights are those with
the best replayed tau on the val split. With --plan it says what it would do and stops.
"""

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from dflash.checkpoint import load_drafter
from dflash.drafter_config import DrafterConfig
from dflash.identity import target_id
from dflash.model import Drafter
from jobs.base.cli import run_as_module
from jobs.base.cluster import cluster
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.base.drafter_folders import MARK, with_local_base
from jobs.base.settings import split_identity, to_yaml
from jobs.base.target_facts import target_taps
from jobs.dataset.samples import features_place
from jobs.dataset.slices import largest
from jobs.reporting.plotting import training_curves
from jobs.tracking.mlflow_client import MlflowFault
from jobs.tracking.mlflow_runs import Tracker
from jobs.training.feed import training_set, val_rows
from jobs.training.plan import check_lora, check_val, make_plan, print_plan, run_shape
from jobs.training.ray_trainer import fit
from jobs.training.runs import Chosen, Pin, choose_run, missing, only_one, run_settings, write_pin
from jobs.training.states import forget_result, read_result

CURVES = 5
"""Most domains with a line in the plot of a run: those with the most val requests."""
SHOWN = ["name", "samples", "parameters", "best_val_tau", "best_step", "slots_per_second"]


def plan(cfg: Config) -> dict[str, Any]:
    """What `run` would do, from names and sizes; starts nothing and writes nothing."""
    found = make_plan(with_local_base(cfg))
    print_plan(found)
    return {"stage": "train", "plan": found}


def run(cfg: Config) -> dict[str, Any]:
    """Train the run of these settings and this data, resume it, or return its finished result.

    Raises ValueError without training samples, for a base drafter of another target shape, for
    settings that need missing data, for a run that another process is training, and for a loss that
    is not finite.
    """
    base, cfg = cfg.train.base, with_local_base(cfg)
    shape = run_shape(cfg)
    chosen = choose_run(cfg, shape)
    if chosen.note:
        console.print(chosen.note)
    place = cfg.place("drafters", chosen.name)
    reused = place.has(MARK)
    if place.is_local and place.path.exists() and not reused:
        raise ValueError(f"{place} has no {MARK} and is in the way: move it away")
    result = _trained(cfg, chosen) if reused else _train(cfg, chosen, shape, base)
    drafter = _load(place.fetch(cfg.path("fetched")))
    summary = {
        "stage": "train",
        "name": chosen.name,
        "folder": str(place),
        "reused": reused,
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "inputs": _inputs(cfg, chosen.pin),
        "base": run_settings(cfg).get("base"),
        **result,
    }
    print_table("Drafter", SHOWN, [[summary.get(key) for key in SHOWN]])
    return summary


def _load(folder: Path) -> Drafter:
    try:
        return load_drafter(folder)
    except ValueError as error:
        raise ValueError(
            f"{error}. Remove {folder} and run the same command: it exports the drafter again"
        ) from error


def _train(cfg: Config, chosen: Chosen, shape: DrafterConfig, base: str) -> dict[str, Any]:
    # Checked before Ray starts: Ray would retry a run that cannot succeed.
    pin, name = chosen.pin, chosen.name
    if lost := missing(cfg, pin):
        raise ValueError(lost)
    data, val = training_set(cfg, pin, shape.num_drafts), val_rows(cfg, pin)
    check_val(cfg, val)
    check_lora(cfg, shape)
    with only_one(cfg, name) as held:
        write_pin(cfg, chosen, shape)
        forget_result(cfg, name)
        tracker = Tracker.start(cfg, name, inputs=_inputs(cfg, pin))
        params = run_settings(cfg) | shape.shape_fields() | {"samples": len(data.samples)}
        execution = split_identity(cfg.train)[1] | {"base": cfg.train.base}
        tracker.describe(params, execution, to_yaml(cfg))
        try:
            with cluster(cfg):
                # As it was given: a worker on another node fetches it for itself.
                result = fit(cfg.override("train", base=base), name, shape, tracker.run_id, held)
        except BaseException:  # including Ctrl-C; the same command sets the run to RUNNING again
            with suppress(MlflowFault):
                tracker.end("FAILED")
            raise
        held.check()
        _draw(tracker, val)
        tracker.end()
    return {"samples": len(data.samples), **result}


def _trained(cfg: Config, chosen: Chosen) -> dict[str, Any]:
    """The metrics of a finished run; ends its MLflow run, if a killed driver left that open."""
    if tracker := Tracker.unfinished(cfg, chosen.name):
        _draw(tracker, val_rows(cfg, chosen.pin))
        tracker.end()
    return read_result(cfg, chosen.name)


def _inputs(cfg: Config, pin: Pin) -> dict[str, Any]:
    return {
        **{f"{table}_version": version for table, version in pin.versions.items()},
        "features": features_place(cfg).name,
        "target_id": target_id(cfg.target_path),
        "target_layer_ids": list(target_taps(cfg)),
    }


def _draw(tracker: Tracker, val: pa.Table) -> None:
    """Attach a plot of the whole run's curves, resumed parts included, to its MLflow run."""
    losses = tracker.curve("loss")
    domains = largest(Counter(val["domain"].to_pylist()), CURVES)
    taus = {name: tracker.curve(f"val_tau/{name}") for name in sorted(domains)}
    taus = {name: points for name, points in taus.items() if points}
    if losses:
        tracker.picture(training_curves(losses, taus), "training.svg")


if __name__ == "__main__":
    run_as_module("train")
