"""flywheel train [--plan] [train.steps=400] [train.base=FOLDER] [train.workers=2]

Traffic + features -> <work>/drafters/<run name>, a folder that vLLM serves. Runs on Ray Train; the
run's name is a hash of its data and settings, so the same command finds its result, and one that
was interrupted is finished on the samples that it began with. The exported weights are those with
the best replayed tau on the val split. With --plan it says what it would do and stops.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from dflash.checkpoint import load_drafter
from dflash.drafter_config import DrafterConfig
from dflash.model import Drafter
from dflash.target_model import target_id
from jobs.base.cli import run_as_module
from jobs.base.cluster import cluster, cpus_each
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.base.settings import split_identity, to_yaml
from jobs.base.target_facts import target_taps
from jobs.dataset.slices import largest
from jobs.harvest import features_folder
from jobs.registry.versions import who
from jobs.reporting.plotting import training_curves
from jobs.tracking.mlflow_runs import MlflowFault, Tracker
from jobs.training.feed import training_set, val_rows
from jobs.training.loop import progress_file, worker
from jobs.training.plan import check_lora, check_val, make_plan, print_plan, run_shape
from jobs.training.progress import follow
from jobs.training.runs import Chosen, choose_run, missing, run_settings, write_pin
from jobs.training.states import forget_result, has_result, read_result, states_folder
from store.files import exclusive
from store.shards import read_manifests

RETRIES = 2
CURVES = 5
"""Domains with a line in the picture of a run: those with the most val requests."""
SHOWN = ["name", "samples", "parameters", "best_val_tau", "best_step", "slots_per_second"]


def plan(cfg: Config) -> dict[str, Any]:
    """What `run` would do, from names and sizes; starts nothing and writes nothing."""
    found = make_plan(cfg)
    print_plan(found)
    return {"stage": "train", "plan": found}


def run(cfg: Config) -> dict[str, Any]:
    """Train (or resume, or find finished) the run of these settings and this data.

    Raises ValueError without training samples, for a base drafter of another target shape, for
    settings that need data which is not there, for a run that another process is training, and for
    a loss that is not finite.
    """
    shape = run_shape(cfg)
    chosen = choose_run(cfg, shape)
    if chosen.note:
        console.print(chosen.note)
    folder = cfg.path("drafters", chosen.name)
    reused = (folder / "config.json").is_file()
    if folder.exists() and not reused:
        raise ValueError(f"{folder} has no config.json and is in the way: move it away")
    result = _trained(cfg, chosen) if reused else _train(cfg, chosen, shape)
    drafter = _load(folder)
    summary = {
        "stage": "train",
        "name": chosen.name,
        "folder": str(folder),
        "reused": reused,
        "parameters": sum(p.numel() for p in drafter.parameters()),
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


def _train(cfg: Config, chosen: Chosen, shape: DrafterConfig) -> dict[str, Any]:
    # What cannot succeed is found before Ray starts, which would try it again.
    pin, name = chosen.pin, chosen.name
    data, val = training_set(cfg, pin, shape.num_drafts), val_rows(cfg, pin)
    check_val(cfg, val)
    check_lora(cfg, shape)
    if lost := missing(cfg, pin):
        raise ValueError(lost)
    with _only_one(cfg, name):
        write_pin(cfg, chosen, shape)
        forget_result(states_folder(cfg, name))
        tracker = Tracker.start(cfg, name, inputs=_inputs(cfg))
        params = run_settings(cfg) | asdict(shape) | {"samples": len(data.samples)}
        execution = split_identity(cfg.train)[1] | {"base": cfg.train.base}
        tracker.describe(params, execution, to_yaml(cfg))
        try:
            with cluster(cfg):
                result = _fit(cfg, name, shape, tracker.run_id)
        except BaseException:  # Ctrl-C, too: the same command makes it run again
            with suppress(MlflowFault):
                tracker.end("FAILED")
            raise
        _draw(tracker, val)
        tracker.end()
    return {"samples": len(data.samples), **result}


@contextmanager
def _only_one(cfg: Config, name: str) -> Iterator[None]:
    """Be the only command that trains this run: two would write one state and one curve."""
    path = cfg.path("runs", f".{name}.lock")
    with exclusive(path, f"{who()}, process {os.getpid()}") as other:
        if other:
            raise ValueError(
                f"run {name} is being trained by {other} (lock {path}): wait for it to end, or "
                "stop it"
            )
        yield


def _trained(cfg: Config, chosen: Chosen) -> dict[str, Any]:
    """What the run said when it was done; ends its MLflow run if the driver was killed before."""
    if tracker := Tracker.unfinished(cfg, chosen.name):
        _draw(tracker, val_rows(cfg, chosen.pin))
        tracker.end()
    folder = states_folder(cfg, chosen.name)
    return read_result(folder) if has_result(folder) else {}


def _inputs(cfg: Config) -> dict[str, Any]:
    identity = target_id(cfg.target_path)
    return {
        "traffic": [m["key"] for m in read_manifests(cfg.path("traffic"))],
        "features": [m["key"] for m in read_manifests(features_folder(cfg, identity))],
        "target_id": identity,
        "target_layer_ids": list(target_taps(cfg)),
    }


def _fit(cfg: Config, name: str, shape: DrafterConfig, mlflow_run: str) -> dict[str, Any]:
    if not cfg.ray.address:  # one machine is not preempted, and the watcher's imports take seconds
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    folder = states_folder(cfg, name)
    trainer = TorchTrainer(
        worker,
        train_loop_config={"cfg": cfg, "name": name, "shape": shape, "mlflow_run": mlflow_run},
        scaling_config=_scaling(cfg),
        run_config=RunConfig(
            name=name,
            storage_path=str(cfg.path("runs").resolve()),
            failure_config=FailureConfig(max_failures=RETRIES),
        ),
    )
    try:
        with follow(progress_file(cfg, name), cfg.train.steps, "train", "step"):
            trainer.fit()
    except ray.train.TrainingFailedError as error:
        if not has_result(folder):
            raise ValueError(f"training {name} failed: {_cause(error)}") from error
    result = read_result(folder)
    if said := result.get("error") or result.get("stopped"):
        raise ValueError(said)
    return result


def _cause(error: ray.train.TrainingFailedError) -> str:
    """What a worker raised, without its traceback (which Ray keeps in its logs)."""
    cause = next(iter(getattr(error, "worker_failures", {}).values()), error)
    cause = getattr(cause, "_base_exc", cause)
    return f"{type(cause).__name__}: {str(cause).strip()}"


def _scaling(cfg: Config) -> ScalingConfig:
    """Workers with a GPU each, or with equal shares of the CPUs.

    Raises ValueError for more workers than GPUs (train.device=cuda), or than local CPUs: Ray would
    wait for them for ever.
    """
    found, workers = ray.cluster_resources(), cfg.train.workers
    gpus = int(found.get("GPU", 0))
    if cfg.train.device == "cuda" and gpus < workers:
        raise ValueError(
            f"train.device=cuda with train.workers={workers}, but the Ray cluster has {gpus} GPUs: "
            "lower train.workers, or leave train.device=auto"
        )
    use_gpu = cfg.train.device != "cpu" and gpus >= workers
    cpus = cpus_each(ray.nodes(), workers, int(use_gpu))
    if cpus == 0 and not cfg.ray.address:  # a cluster elsewhere may grow
        raise ValueError(
            f"train.workers={workers}, but the local Ray cluster has {found.get('CPU', 0):.0f} "
            "CPUs: lower train.workers, or raise ray.num_cpus"
        )
    resources = {"CPU": max(1, cpus)} | ({"GPU": 1} if use_gpu else {})
    return ScalingConfig(num_workers=workers, use_gpu=use_gpu, resources_per_worker=resources)


def _draw(tracker: Tracker, val: list[dict[str, Any]]) -> None:
    """The curves of the whole run, resumed parts included, as a picture in MLflow."""
    losses = tracker.curve("loss")
    domains = largest(Counter(row["domain"] for row in val), CURVES)
    taus = {name: tracker.curve(f"val_tau/{name}") for name in sorted(domains)}
    taus = {name: points for name, points in taus.items() if points}
    if losses:
        tracker.picture(training_curves(losses, taus), "training.svg")


if __name__ == "__main__":
    run_as_module("train")
