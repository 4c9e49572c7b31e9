"""The workers of a training run on Ray Train: how many, their resources, and their result."""

import os
from pathlib import Path
from typing import Any

import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError

from dflash.drafter_config import DrafterConfig
from jobs.base.cluster import node_id, shares_only_a_bucket
from jobs.base.config import Config
from jobs.base.console import console
from jobs.base.drafter_folders import MARK
from jobs.base.placement import Wanted, cluster_nodes, cpus_each, in_words, placed
from jobs.tracking.mlflow_client import sqlite_file
from jobs.training.loop import worker
from jobs.training.progress import progress_of
from jobs.training.states import has_ended, products, read_result
from store.lease import Lease
from store.place import first_line

RETRIES = 2
"""Groups that may be lost."""


def fit(
    cfg: Config, name: str, shape: DrafterConfig, mlflow_run: str, held: Lease
) -> dict[str, Any]:
    """Run the workers to the end, as long as nobody takes the lease `held` over; returns their
    result. A group that lost a worker, or its node, is placed anew on what is left of the cluster.

    Raises ValueError with the reason if they stopped early, and if they can never be placed.
    """
    if not cfg.ray.address:
        # A local machine is not preempted, and importing the watcher takes seconds.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        # How often Ray asks the workers whether they are ready or done. Its default is 2 s.
        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.3")
    loop_config = {
        "cfg": _for_nodes(cfg, name),
        "name": name,
        "shape": shape,
        "mlflow_run": mlflow_run,
        "lease": (held.place, held.number),
        "home": node_id(),
    }
    with progress_of(cfg, name).follow(cfg.train.steps, "train", "step"):
        _until_done(cfg, name, loop_config)
    result = read_result(cfg, name)
    if said := result.get("error") or result.get("stopped"):
        raise ValueError(said)
    return result


def _for_nodes(cfg: Config, name: str) -> Config:
    """The settings of workers that do not see this machine's folders: with train.base in the
    bucket. Raises ValueError if MLflow is a file of this machine.
    """
    if not shares_only_a_bucket(cfg):
        return cfg
    if (file := sqlite_file(cfg)) and len(cluster_nodes()[0]) > 1:
        raise ValueError(
            f"MLflow is the file {file}, which workers on other nodes cannot reach: start a server "
            "(docs/how-to/team-registry.md) and set mlflow.uri to it"
        )
    base = cfg.train.base
    if not base or "://" in base:
        return cfg
    place = products(cfg, name) / "base"
    if not place.has(MARK):
        place.publish(Path(base), MARK)
    return cfg.override("train", base=str(place))


def _until_done(cfg: Config, name: str, loop_config: dict[str, Any]) -> None:
    """Run groups of workers until the run has ended. Raises ValueError after RETRIES failures."""
    failures = 0
    while True:
        try:
            _trainer(cfg, name, loop_config).fit()
            return
        except ray.train.TrainingFailedError as error:
            if has_ended(cfg, name):
                return
            waited = isinstance(_failure(error), WorkerGroupStartupTimeoutError)
            failures += not waited
            if failures > RETRIES or isinstance(_failure(error), ValueError):
                raise ValueError(f"training {name} failed: {_cause(error)}") from error
            what = "has no room for the workers yet" if waited else f"lost one: {_cause(error)}"
            console.print(f"train: Ray {what}; they are placed anew", markup=False)


def _trainer(cfg: Config, name: str, loop_config: dict[str, Any]) -> TorchTrainer:
    """A group of workers, placed on the nodes that the cluster has now."""
    trainer = TorchTrainer(
        worker,
        train_loop_config=loop_config,
        scaling_config=scaling(cfg),
        run_config=RunConfig(
            name=name,
            # Nothing of ours: states are written by jobs/training/states.py.
            storage_path=str(cfg.path("runs").resolve()),
            # Ray would place a group again as it was, and wait for ever for a node that is gone.
            failure_config=FailureConfig(controller_failure_limit=0, max_preemption_failures=0),
        ),
    )
    # Ray Train's own handler of Ctrl-C would end the process, and stay for the stages that follow.
    vars(trainer)["_register_sigint_handler"] = lambda controller: None
    return trainer


def _failure(error: ray.train.TrainingFailedError) -> Exception:
    """What a worker, or the start of a group, raised."""
    failures: Any = getattr(error, "worker_failures", None) or {}
    cause = next(iter(failures.values()), getattr(error, "controller_failure", error))
    return getattr(cause, "_base_exc", cause)


def _cause(error: ray.train.TrainingFailedError) -> str:
    """The same in one line, without its traceback (which Ray keeps in its logs)."""
    cause = _failure(error)
    return f"{type(cause).__name__}: {first_line(cause)}"


def scaling(cfg: Config) -> ScalingConfig:
    """Workers with one GPU each, or with equal shares of the CPUs.

    Raises ValueError if they can never be placed: Ray would wait for ever.
    """
    train, (whole, free) = cfg.train, cluster_nodes()
    on_cpus, on_gpus = (
        Wanted("train", train.workers, train.cpus, gpus, "train.device") for gpus in (0, 1)
    )
    use_gpu = train.device == "cuda" or (train.device == "auto" and bool(cpus_each(on_gpus, whole)))
    if train.device == "auto" and not use_gpu and any(node.gpus for node in whole):
        told = f"train: on CPUs, since {train.workers} workers with a GPU each do not fit on "
        console.print(told + in_words(whole))
    cpus = placed(cfg, on_gpus if use_gpu else on_cpus, whole, free)
    resources = {"CPU": cpus} | ({"GPU": 1} if use_gpu else {})
    return ScalingConfig(num_workers=train.workers, use_gpu=use_gpu, resources_per_worker=resources)
