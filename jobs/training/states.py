"""Resumable states of a training run: runs/<name>/step-00000055.pt, the newest KEEP.

A state is written to the scratch folder and, if `work` is a bucket, copied there, so that workers
on other nodes find it. A file at its final name is complete, even if a writer was killed. So the
newest file is the newest complete state.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from jobs.base.config import Config
from store.files import commit, sweep
from store.place import Place, read_json, write_json

KEEP = 2
RESULT = "result.json"


def products(cfg: Config, name: str) -> Place:
    """What other hosts see of the run `name`: its pins, result and states."""
    return cfg.place("runs", name)


def write_result(cfg: Config, name: str, result: dict[str, Any]) -> None:
    """Write a worker's result for the driver: metrics, or `error` for a failure that the run would
    repeat, or `stopped` for a failure whose cause can be removed.
    """
    write_json(products(cfg, name), RESULT, result)


def read_result(cfg: Config, name: str) -> dict[str, Any]:
    """What `write_result` wrote; {} if nothing was.

    Ray Train's own report is not enough: without a checkpoint Ray (2.60) keeps its metrics only if
    it polls between the report and the end of the worker.
    """
    return read_json(products(cfg, name), RESULT) or {}


def forget_result(cfg: Config, name: str) -> None:
    """Remove the result of an earlier command, before the run is trained further."""
    products(cfg, name).delete([RESULT])


def has_ended(cfg: Config, name: str) -> bool:
    """Whether the run failed, or its drafter is exported. A result alone is not enough: it is
    written before the export, which may be killed or find no disk space.
    """
    result = read_result(cfg, name)
    if not result:
        return False
    failed = not {"error", "stopped"}.isdisjoint(result)
    return failed or cfg.place("drafters", name).has("config.json")


def is_unfinished(cfg: Config, name: str) -> bool:
    """Whether the run can go on: it has not ended, or it stopped for a cause that may be gone."""
    return not has_ended(cfg, name) or "stopped" in read_result(cfg, name)


def states_folder(cfg: Config, name: str) -> Path:
    """Where the states of the run `name` are written; Ray Train keeps its own files there too."""
    return cfg.path("runs", name)


def find_states(cfg: Config, name: str) -> dict[str, float]:
    """{file name: when it was written, in seconds since 1970} of the states that a run can go on
    from, on any node: of those in the bucket, if `work` is one.
    """
    place = products(cfg, name)
    if place.is_local:
        place = Place(str(states_folder(cfg, name)))
    return {f.name: f.modified.timestamp() for f in place.objects() if _is_state(f.name)}


def newest_state(cfg: Config, name: str) -> Path | None:
    """The state to resume from, copied from the bucket if it is not here; None without one."""
    newest = max(find_states(cfg, name), default=None)
    if newest is None:
        return None
    path, place = states_folder(cfg, name) / newest, products(cfg, name)
    if not path.is_file():
        commit(path, lambda stream: place.save(newest, Path(stream.name)))
    return path


def _is_state(name: str) -> bool:
    return name.startswith("step-") and name.endswith(".pt")


def state_step(name: str) -> int:
    """Optimizer steps done in the state of this file name."""
    return int(name.removeprefix("step-").removesuffix(".pt"))


def commit_state(cfg: Config, name: str, step: int, state: dict[str, Any]) -> Path:
    """Write a state; then remove all but the newest KEEP, and files that killed writers left."""
    folder, place = states_folder(cfg, name), products(cfg, name)
    path = folder / f"step-{step:08d}.pt"

    def write(stream: BinaryIO) -> None:
        torch.save(state, stream)
        if not place.is_local:
            # Before it gets its name here: so a state that is here is, or was, in the bucket, and
            # all nodes resume the same one.
            stream.flush()
            place.write(path.name, Path(stream.name))

    commit(path, write)
    if not place.is_local:
        place.delete(sorted(find_states(cfg, name))[:-KEEP])
    for old in sorted(folder.glob("step-*.pt"))[:-KEEP]:
        with suppress(FileNotFoundError):
            old.unlink()
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
