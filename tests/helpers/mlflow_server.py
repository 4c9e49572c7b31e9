"""A real MLflow server for tests."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError


@contextmanager
def running(folder: Path, database: Path) -> Iterator[str]:
    """The URL of a server that keeps artifacts, as a team runs it. All it has is in `folder`;
    `database` is a database with MLflow's tables to begin with.
    """
    shutil.copy(database, folder / "mlflow.db")
    store = f"sqlite:///{folder}/mlflow.db"
    with serving(folder, free_port(), store, str(folder / "artifacts")) as url:
        yield url


@contextmanager
def serving(
    folder: Path, port: int, store: str, artifacts: str, env: dict[str, str] | None = None
) -> Iterator[str]:
    """The URL of a server with this backend store and this artifact root. `env` is for it alone:
    clients need no keys of an object store.
    """
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", store, "--artifacts-destination", artifacts]
    command += ["--workers", "1"]
    with (
        (folder / "log").open("a") as log,
        subprocess.Popen(
            command,
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
            # Its queue of jobs is nine more processes that each import MLflow: nobody uses it here.
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"} | (env or {}),
        ) as process,
    ):
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(url: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"{url} did not answer")
