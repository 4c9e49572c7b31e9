"""A lock, so that only one process at a time moves aliases."""

import contextlib
import fcntl
import getpass
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from jobs.base.config import Config

LEASE_SECONDS = 60.0


def who() -> str:
    """user@host, as in leases and promotion records."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        user = f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


@contextlib.contextmanager
def lease(cfg: Config, seconds: float = LEASE_SECONDS) -> Iterator[None]:
    """Be the only process that moves aliases of this work folder; waits up to `seconds` for that.

    It is a kernel lock on a file, so it ends with its process, even a killed one. Raises ValueError
    naming the holder when the time is up.
    """
    path = cfg.path("promotions", ".lease")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as stream:
        deadline = time.monotonic() + seconds
        while not _try_lock(stream):
            if time.monotonic() > deadline:
                stream.seek(0)
                raise ValueError(
                    f"another promotion is running ({stream.read().strip()}, lock {path}): "
                    "wait for it to end, then try again"
                )
            time.sleep(0.2)
        stream.truncate(0)
        stream.write(who())
        stream.flush()
        yield


def _try_lock(stream: Any) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
