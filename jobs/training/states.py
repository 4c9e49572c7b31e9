"""Resumable states of a training run: <work>/runs/<name>/step-00000055.pt, the newest few.

A state is one file, committed like every other (store/files.py): at its final name it is complete,
whatever was killed while writing it. So the newest file is the newest complete state.
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
    """What a worker that ends has to say, for the driver: metrics; or `error`, a failure that
    belongs to the run; or `stopped`, one that goes away with its cause.
    """
    commit(folder / RESULT, lambda stream: stream.write(json.dumps(result).encode()))


def read_result(folder: Path) -> dict[str, Any]:
    """What `write_result` wrote.

    Ray Train keeps the metrics of a report without a checkpoint only if it polls between the
    report and the end of the worker (2.60).
    """
    return read_json(folder / RESULT)


def has_result(folder: Path) -> bool:
    """Whether a worker of this run has ended and said so."""
    return (folder / RESULT).is_file()


def forget_result(folder: Path) -> None:
    """For a command that trains on: what an earlier one said is no longer true."""
    (folder / RESULT).unlink(missing_ok=True)


def has_ended(cfg: Config, name: str) -> bool:
    """Whether nothing is left to do of this run: it failed, or its drafter is exported. A result
    alone does not say so: it is written before the export, which may be killed or find no room.
    """
    folder = states_folder(cfg, name)
    if not has_result(folder):
        return False
    failed = not {"error", "stopped"}.isdisjoint(read_result(folder))
    return failed or cfg.path("drafters", name, "config.json").is_file()


def is_unfinished(cfg: Config, name: str) -> bool:
    """Whether this run may go on: it neither ended nor failed in a way that it would again."""
    return not has_ended(cfg, name) or "stopped" in read_result(states_folder(cfg, name))


def states_folder(cfg: Config, name: str) -> Path:
    """Where the states of the run `name` are; Ray Train keeps its own files there too."""
    return cfg.path("runs", name)


def newest_state(folder: Path) -> Path | None:
    """The state to resume from, None to start."""
    return max(folder.glob("step-*.pt"), default=None)


def state_step(path: Path) -> int:
    """Optimizer steps done in this state."""
    return int(path.stem.removeprefix("step-"))


def commit_state(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write a state, then remove all but the newest KEEP and what dead writers left."""
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
