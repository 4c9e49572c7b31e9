"""Resumable states of a training run: <work>/runs/<name>/step-00000055.pt, the newest few.

A state is one file, committed like every other (store/files.py): at its final name it is complete,
whatever was killed while writing it. So the newest file is the newest complete state.
"""

from pathlib import Path
from typing import Any

import torch

from jobs.config import Config
from store.files import commit, sweep

KEEP = 2


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
        old.unlink()
    sweep(folder)
    return path


def read_state(path: Path) -> dict[str, Any]:
    """What `commit_state` wrote, on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)
