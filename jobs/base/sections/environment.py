"""Where a command runs: the target, the Ray cluster, the MLflow server."""

from dataclasses import dataclass
from typing import Literal

from jobs.base.settings import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The served model: a Hugging Face folder."""

    path: str = setting(
        "",
        "folder of the target, a local one on each node or a URL (s3://bucket/models/x); "
        "empty: target/ in scratch, made by `flywheel target`",
        path=True,
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "compute dtype; auto: bfloat16 where the hardware multiplies it, else float32"
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto",
        "where this process computes (replay, reference decoder, preflight); auto: a GPU if torch "
        "has one. Training has train.device, and vLLM its own build",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ray:
    """Where the jobs run."""

    address: str = setting("", "Ray cluster to join; empty: a local one that ends with the command")
    num_cpus: int = setting(0, "CPUs of the local cluster; 0: all", minimum=0)
    submit_cpus: int = setting(
        1, "with --submit: CPUs of the command itself, which replays and starts servers", minimum=0
    )
    submit_gpus: float = setting(0.0, "with --submit: its GPUs", minimum=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlflow:
    """Experiment tracking and the model registry."""

    uri: str = setting("", "tracking and registry URI; empty: sqlite file <scratch>/mlflow.db")
    artifacts: str = setting(
        "", "artifact root; empty: <scratch>/mlartifacts, or the server's own if uri names one"
    )
    experiment: str = setting("flywheel", "experiment that collects the training runs")
    model: str = setting(
        "drafter", "registered model that carries champion, challenger, previous; no / or :"
    )

    def __post_init__(self) -> None:
        _check_name("mlflow.experiment", self.experiment)
        _check_name("mlflow.model", self.model, refused="/:")


def _check_name(setting_name: str, name: str, refused: str = "") -> None:
    """Raise ValueError for a name that MLflow or the database behind it would refuse later."""
    fault = ""
    if not name.strip() or name in (".", ".."):
        fault = "a name is needed"
    elif found := [c for c in name if c in refused]:
        fault = f"MLflow allows no {found[0]!r} in it, write - instead"
    elif len(name) > 256 or not name.isprintable() or name != name.strip():
        fault = "at most 256 printable characters, without space around them"
    if fault:
        raise ValueError(f"{setting_name} = {name!r}: {fault}")
