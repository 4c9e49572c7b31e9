"""The workers of a training run on Ray Train: how many, their resources, and their result."""

import os
from typing import Any

import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from dflash.drafter_config import DrafterConfig
from jobs.base.cluster import cpus_each
from jobs.base.config import Config
from jobs.training.loop import progress_file, worker
from jobs.training.progress import follow
from jobs.training.states import has_ended, read_result
from store.lease import Lease

RETRIES = 2


def fit(
    cfg: Config, name: str, shape: DrafterConfig, mlflow_run: str, held: Lease
) -> dict[str, Any]:
    """Run the workers to the end, as long as nobody takes the lease `held` over; returns their
    result. Raises ValueError with the reason if they stopped early.
    """
    if not cfg.ray.address:
        # A local machine is not preempted, and importing the watcher takes seconds.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        # How often Ray asks the workers whether they are ready or done. Its default is 2 s.
        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.3")
    trainer = TorchTrainer(
        worker,
        train_loop_config={
            "cfg": cfg,
            "name": name,
            "shape": shape,
            "mlflow_run": mlflow_run,
            "lease": (held.place, held.number),
        },
        scaling_config=scaling(cfg),
        run_config=RunConfig(
            name=name,
            storage_path=str(cfg.path("runs").resolve()),
            failure_config=FailureConfig(max_failures=RETRIES),
        ),
    )
    # Ray Train's own handler of Ctrl-C would end the process, and stay for the stages that follow.
    vars(trainer)["_register_sigint_handler"] = lambda controller: None
    try:
        with follow(progress_file(cfg, name), cfg.train.steps, "train", "step"):
            trainer.fit()
    except ray.train.TrainingFailedError as error:
        if not has_ended(cfg, name):
            raise ValueError(f"training {name} failed: {_cause(error)}") from error
    result = read_result(cfg, name)
    if said := result.get("error") or result.get("stopped"):
        raise ValueError(said)
    return result


def _cause(error: ray.train.TrainingFailedError) -> str:
    """What a worker raised, without its traceback (which Ray keeps in its logs)."""
    cause = next(iter(getattr(error, "worker_failures", {}).values()), error)
    cause = getattr(cause, "_base_exc", cause)
    return f"{type(cause).__name__}: {str(cause).strip()}"


def scaling(cfg: Config) -> ScalingConfig:
    """Workers with one GPU each, or with equal shares of the CPUs.

    Raises ValueError for more workers than GPUs if train.device=cuda, and for more than a local
    cluster's CPUs: Ray would wait for ever.
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
    if cpus == 0 and not cfg.ray.address:  # a remote cluster may still grow
        raise ValueError(
            f"train.workers={workers}, but the local Ray cluster has {found.get('CPU', 0):.0f} "
            "CPUs: lower train.workers, or raise ray.num_cpus"
        )
    resources = {"CPU": max(1, cpus)} | ({"GPU": 1} if use_gpu else {})
    return ScalingConfig(num_workers=workers, use_gpu=use_gpu, resources_per_worker=resources)
