"""Training runs in MLflow: one run per run name, resumed when the training resumes."""

from typing import Any

import mlflow
from mlflow.data.code_dataset_source import CodeDatasetSource
from mlflow.data.meta_dataset import MetaDataset
from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from jobs.config import Config
from store.ids import short_hash


class Tracker:
    """Writes to one MLflow run. Safe to pickle apart: a worker joins by run id."""

    def __init__(self, client: MlflowClient, run_id: str):
        self.client, self.run_id = client, run_id

    @classmethod
    def start(cls, cfg: Config, name: str, inputs: dict[str, Any]) -> "Tracker":
        """The run named `name`, created with its dataset input if it does not exist."""
        mlflow.set_tracking_uri(cfg.mlflow_uri)
        client = MlflowClient(cfg.mlflow_uri)
        experiment = experiment_id(client, cfg)
        found = client.search_runs([experiment], f"tags.`flywheel.run` = '{name}'")
        if found:
            client.update_run(found[0].info.run_id, status="RUNNING")
            return cls(client, found[0].info.run_id)
        run = client.create_run(experiment, tags={"flywheel.run": name}, run_name=name)
        source = CodeDatasetSource(tags={key: str(value) for key, value in inputs.items()})
        dataset = MetaDataset(source, name="traffic", digest=short_hash(inputs)[:16])
        with mlflow.start_run(run_id=run.info.run_id):
            mlflow.log_input(dataset, context="training")
        client.update_run(run.info.run_id, status="RUNNING")
        return cls(client, run.info.run_id)

    @classmethod
    def join(cls, cfg: Config, run_id: str) -> "Tracker":
        """The same run from a worker."""
        return cls(MlflowClient(cfg.mlflow_uri), run_id)

    def params(self, values: dict[str, Any]) -> None:
        """Log parameters once; logging the same again is accepted by MLflow."""
        for name, value in values.items():
            self.client.log_param(self.run_id, name, value)

    def log(
        self,
        step: int,
        history: list[dict[str, float]],
        val_tau: float | None,
        seconds: float,
        slots: int,
    ) -> None:
        """Metrics of the steps since the last call, and of this validation."""
        first = step - len(history)
        metrics = [
            Metric(name, value, 0, first + i + 1)
            for i, values in enumerate(history)
            for name, value in values.items()
        ]
        metrics.append(Metric("train_seconds", seconds, 0, step))
        if seconds:
            metrics.append(Metric("slots_per_second", slots / seconds, 0, step))
        if val_tau is not None:
            metrics.append(Metric("val_tau", val_tau, 0, step))
        for start in range(0, len(metrics), 1000):
            self.client.log_batch(self.run_id, metrics[start : start + 1000])

    def end(self) -> None:
        """Mark the run finished."""
        self.client.set_terminated(self.run_id)


def experiment_id(client: MlflowClient, cfg: Config) -> str:
    """The configured experiment, created with its artifact root if absent."""
    found = client.get_experiment_by_name(cfg.mlflow.experiment)
    if found is not None:
        return found.experiment_id
    return client.create_experiment(cfg.mlflow.experiment, artifact_location=cfg.mlflow_artifacts)
