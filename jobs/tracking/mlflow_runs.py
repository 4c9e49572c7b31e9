"""Training runs in MLflow: one run per run name, resumed when the training resumes.

The client is that of jobs/tracking/mlflow_client.py: it raises MlflowFault.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlflow.data.code_dataset_source import CodeDatasetSource
from mlflow.data.meta_dataset import MetaDataset
from mlflow.entities import DatasetInput, InputTag, Metric, Run
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking import MlflowClient

from jobs.base.config import Config
from jobs.tracking.mlflow_client import (
    cut,
    equals,
    open_client,
    plain,
)
from store.ids import short_hash

RUN = "flywheel.run"
MAX_PARAM, MAX_TAG = 6000, 8000
"""Most characters that MLflow takes of a parameter and of a tag."""


class Tracker:
    """Writes to one MLflow run. It is not pickled: a worker opens its own by run id (`join`)."""

    def __init__(self, client: MlflowClient, run_id: str):
        self.client, self.run_id = client, run_id

    @classmethod
    def start(cls, cfg: Config, name: str, inputs: dict[str, Any]) -> "Tracker":
        """The run named `name`, set to RUNNING; created with its dataset input if it is new."""
        client = open_client(cfg)
        experiment = experiment_id(client, cfg)
        found = _find_run(client, experiment, name)
        if found:
            client.update_run(found.info.run_id, status="RUNNING")
            return cls(client, found.info.run_id)
        run = client.create_run(experiment, tags={RUN: name}, run_name=cut(name, MAX_TAG))
        source = CodeDatasetSource(tags={key: cut(value, 8000) for key, value in inputs.items()})
        dataset = MetaDataset(source, name="traffic", digest=short_hash(inputs)[:16])
        context = [InputTag("mlflow.data.context", "training")]
        client.log_inputs(
            run.info.run_id, datasets=[DatasetInput(dataset._to_mlflow_entity(), context)]
        )
        return cls(client, run.info.run_id)

    @classmethod
    def unfinished(cls, cfg: Config, name: str) -> "Tracker | None":
        """The run named `name` if it exists and is not finished, else None."""
        client = open_client(cfg)
        found = _find_run(client, experiment_id(client, cfg), name)
        if found is None or found.info.status == "FINISHED":
            return None
        return cls(client, found.info.run_id)

    @classmethod
    def join(cls, cfg: Config, run_id: str) -> "Tracker":
        """Open the same run in a worker."""
        return cls(open_client(cfg), run_id)

    def describe(self, params: dict[str, Any], tags: dict[str, Any], config: str) -> None:
        """Log parameters (logging equal ones again is no error), tags (how the run is executed now)
        and the configuration.
        """
        for name, value in params.items():
            self.client.log_param(self.run_id, name, cut(value, MAX_PARAM))
        for name, value in tags.items():
            self.client.set_tag(self.run_id, f"execution.{name}", cut(value, MAX_TAG))
        self.client.log_text(self.run_id, config, "config.yaml")

    def log(self, step: int, history: list[dict[str, float]], values: dict[str, float]) -> None:
        """Log the metrics in `history`, one entry for each of the last steps up to `step`, and
        further values of `step`.
        """
        first = step - len(history)
        metrics = [
            Metric(name, value, _now(), first + i + 1)
            for i, of_step in enumerate(history)
            for name, value in of_step.items()
        ]
        metrics += [Metric(metric_name(name), v, _now(), step) for name, v in values.items()]
        for start in range(0, len(metrics), 1000):
            self.client.log_batch(self.run_id, metrics[start : start + 1000])

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric by step; a step that a resumed run repeated is there once."""
        history = self.client.get_metric_history(self.run_id, metric_name(name))
        return sorted({metric.step: metric.value for metric in history}.items())

    def picture(self, svg: str, file: str) -> None:
        """Attach a picture to the run."""
        self.client.log_text(self.run_id, svg, file)

    @contextmanager
    def system_metrics(self) -> Iterator[None]:
        """During the block, log MLflow's CPU, memory, disk, network and GPU metrics."""
        monitor = SystemMetricsMonitor(
            self.run_id, resume_logging=True, tracking_uri=self.client.tracking_uri
        )
        monitor.start()
        try:
            yield
        finally:
            monitor.finish()

    def end(self, status: str = "FINISHED") -> None:
        """Mark the run finished, or FAILED."""
        self.client.set_terminated(self.run_id, status)


def run_named(client: MlflowClient, cfg: Config, name: str) -> str:
    """The id of the run named `name`: that of the training run, or of a new one for a drafter that
    was trained elsewhere.
    """
    experiment = experiment_id(client, cfg)
    found = _find_run(client, experiment, name)
    if found:
        return found.info.run_id
    run = client.create_run(experiment, tags={RUN: name}, run_name=name)
    client.set_terminated(run.info.run_id)
    return run.info.run_id


def origin(client: MlflowClient, cfg: Config, name: str) -> dict[str, str]:
    """What the training run `name` was made from: its inputs, and `base`, the identity of the
    drafter that it began with. Empty for a drafter that was trained elsewhere.
    """
    found = _find_run(client, experiment_id(client, cfg), name)
    if found is None:
        return {}
    known = found.inputs.dataset_inputs if found.inputs else []
    sources = [one.dataset.source for one in known]
    inputs = json.loads(sources[0]).get("tags", {}) if sources else {}
    base = found.data.params.get("base")
    return inputs | ({"base": base} if base else {})


def attach(cfg: Config, name: str, file: Path, folder: str) -> None:
    """Keep a text file below `folder` of the run named `name` (`run_named`)."""
    client = open_client(cfg)
    run_id = run_named(client, cfg, name)
    client.log_text(run_id, file.read_text(), f"{folder}/{plain(file.stem)}{file.suffix}")


def metric_name(name: str) -> str:
    """A name such as `val_tau/<domain>` in a form that MLflow takes: the domain, which may be any
    text, goes through `plain`.
    """
    kind, slash, domain = name.partition("/")
    return kind + slash + (plain(domain) if slash else "")


def _find_run(client: MlflowClient, experiment: str, name: str) -> Run | None:
    """The newest run named `name`."""
    found = client.search_runs([experiment], equals(f"tags.`{RUN}`", name))
    return next((run for run in found if run.data.tags[RUN] == name), None)


def _now() -> int:
    return round(time.time() * 1000)


def experiment_id(client: MlflowClient, cfg: Config) -> str:
    """The id of the configured experiment, created with its artifact root if absent.

    Raises ValueError if it was deleted: MLflow still reserves its name.
    """
    found = client.get_experiment_by_name(cfg.mlflow.experiment)
    if found is not None:
        if found.lifecycle_stage != "active":
            raise ValueError(
                f"experiment {cfg.mlflow.experiment!r} is deleted: `mlflow experiments restore -x "
                f"{found.experiment_id}`, or name another in mlflow.experiment"
            )
        return found.experiment_id
    return client.create_experiment(cfg.mlflow.experiment, artifact_location=cfg.mlflow_artifacts)
