"""Resumable states of a training run: <work>/runs/<name>/step-00000055.pt, the newest KEEP.

A state is one file, committed like every other (store/files.py). A file at its final name is
complete, even if a writer was killed. So the newest file is the newest complete state.
"""

import json
from pathlib import Path
from typing import Any

import torch

from jobs.base.config import Config
from store.files import commit, read_json, sweep

KEEP = 2
RESULT = "result.json"


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write a worker's result for the driver: metrics, or `error` for a failure that the run would
    repeat, or `stopped` for a failure whose cause can be removed.
    """
    commit(folder / RESULT, lambda stream: stream.write(json.dumps(result).encode()))


def read_result(folder: Path) -> dict[str, Any]:
    """What `write_result` wrote.

    Ray Train's own report is not enough: without a checkpoint Ray (2.60) keeps its metrics only if
    it polls between the report and the end of the worker.
    """
    return read_json(folder / RESULT)


def has_result(folder: Path) -> bool:
    """Whether a worker of this run has ended and written a result."""
    return (folder / RESULT).is_file()


def forget_result(folder: Path) -> None:
    """Remove the result of an earlier command, before the run is trained further."""
    (folder / RESULT).unlink(missing_ok=True)


def has_ended(cfg: Config, name: str) -> bool:
    """Whether the run failed, or its drafter is exported. A result alone is not enough: it is
    written before the export, which may be killed or find no disk space.
    """
    folder = states_folder(cfg, name)
    if not has_result(folder):
        return False
    failed = not {"error", "stopped"}.isdisjoint(read_result(folder))
    return failed or cfg.path("drafters", name, "config.json").is_file()


def is_unfinished(cfg: Config, name: str) -> bool:
    """Whether the run can go on: it has not ended, or it stopped for a cause that may be gone."""
    return not has_ended(cfg, name) or "stopped" in read_result(states_folder(cfg, name))


def states_folder(cfg: Config, name: str) -> Path:
    """Where the states of the run `name` are; Ray Train keeps its own files there too."""
    return cfg.path("runs", name)


def newest_state(folder: Path) -> Path | None:
    """The state to resume from; None if there is none."""
    return max(folder.glob("step-*.pt"), default=None)


def state_step(path: Path) -> int:
    """Optimizer steps done in this state."""
    return int(path.stem.removeprefix("step-"))


def commit_state(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write a state; then remove all but the newest KEEP, and files that killed writers left."""
    path = folder / f"step-{step:08d}.pt"
    commit(path, lambda stream: torch.save(state, stream))
    for old in sorted(folder.glob("step-*.pt"))[:-KEEP]:
        old.unlink(missing_ok=True)
    sweep(folder)
    return path


def read_state(path: Path) -> dict[str, Any]:
    """What `commit_state` wrote, on the CPU. Raises ValueError if the file is damaged."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} is damaged ({error}): remove it, and the run continues from the state before"
        ) from error
