"""Atomic files: hidden temporary in the same folder, fsync, then one atomic step to the final name.

A file at its final name is complete. A writer holds a lock on its temporary, so `sweep` can tell
a dead writer's leftovers from a file that is being written right now.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

SUFFIX = ".tmp"


def fsync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_locked(path: Path) -> tuple[Path, BinaryIO]:
    """A new locked temporary beside `path`. Retries if a sweep removed it before it was locked."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{SUFFIX}")
        stream = open(temporary, "xb")  # noqa: SIM115 (handed to the caller)
        fcntl.flock(stream, fcntl.LOCK_EX)
        if temporary.exists():
            return temporary, stream
        stream.close()


def commit(
    path: Path,
    write: Callable[[BinaryIO], object],
    check: Callable[[Path], object] | None = None,
    overwrite: bool = True,
) -> bool:
    """Write a file through a temporary. `write(stream)` fills it, `check(temporary)` may refuse it.

    overwrite=True renames over an existing file; overwrite=False creates only if absent and returns
    False when another writer was first. Nothing is left behind when `write` or `check` raises.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, stream = _open_locked(path)
    try:
        with stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
            if check is not None:
                check(temporary)
            if overwrite:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)  # fails if the name is taken, and is complete if not
        fsync_folder(path.parent)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.filename is None and error.errno:  # a full disk says no more than that
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


@contextmanager
def exclusive(path: Path, holder: str) -> Iterator[str]:
    """Hold the kernel lock on `path` while the block runs. If the process dies, the kernel releases
    it. Yields "" if we have the lock, else the `holder` text of the process that has it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            yield stream.read().strip() or "another process"
            return
        stream.truncate(0)
        stream.write(holder)
        stream.flush()
        yield ""


def read_json(
    path: Path, keys: Collection[str] = (), fix: str = "remove it and run its stage"
) -> dict[str, Any]:
    """The JSON object in a file that a stage wrote, with at least `keys`.

    Raises ValueError with the path and the `fix` if it is anything else.
    """
    try:
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError(f"expected an object, found {type(value).__name__}")
        missing = sorted(set(keys) - set(value))
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): {fix}") from error
    return value


def sweep(folder: Path) -> int:
    """Remove temporaries of dead writers in `folder` and its manifests; how many were removed."""
    removed = 0
    for temporary in [*folder.glob(f".*{SUFFIX}"), *folder.glob(f"manifests/.*{SUFFIX}")]:
        try:
            with open(temporary, "rb") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                temporary.unlink()
                removed += 1
        except (BlockingIOError, FileNotFoundError):
            continue  # its writer is alive, or has just renamed it
    return removed


def save_json(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    """Write a JSON file in one step; returns the value as a reader of the file gets it."""
    data = json.dumps(value, indent=1).encode() + b"\n"
    commit(path, lambda stream: stream.write(data))
    return json.loads(data)
