"""Atomic files of the scratch folder: a hidden temporary beside the file, fsync, then a rename.

A file at its final name is complete. A writer holds a lock on its temporary, so `sweep` can tell
a dead writer's leftovers from a file that is being written right now.
"""

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from store.place import plain_fault

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


def commit(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file through a temporary that `write(stream)` fills, in place of one of that name.

    Nothing is left behind when `write` raises.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, stream = _open_locked(path)
    try:
        with stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
            os.replace(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        if fault := plain_fault(error, str(path)):
            raise fault from error
        if error.filename is None and error.errno:
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


def sweep(folder: Path) -> int:
    """Remove temporaries of dead writers in `folder`; how many were removed."""
    removed = 0
    for temporary in folder.glob(f".*{SUFFIX}"):
        try:
            with open(temporary, "rb") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                temporary.unlink()
                removed += 1
        except (BlockingIOError, FileNotFoundError):
            continue  # its writer is alive, or has just renamed it
    return removed
