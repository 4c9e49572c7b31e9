"""A Ray cluster of several nodes on this machine that share no folder: each has its own one for
temporary files, and works in it.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from tests.helpers.mlflow_server import free_port

TRIES = 3
ROOT = Path(__file__).parents[2]
# A node that is gone is known after some seconds instead of half a minute.
ENV = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "OMP_NUM_THREADS": "1",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
}


class Node:
    """`ray start` in a folder of its own."""

    def __init__(self, folder: Path, env: dict[str, str], *words: str) -> None:
        self.folder, self.words = folder, [*words, f"--temp-dir={folder}/ray"]
        self.words += [f"--dashboard-agent-listen-port={free_port()}"]
        self.words += [f"--object-store-memory={100 << 20}", "--disable-usage-stats"]
        (folder / "tmp").mkdir(parents=True)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env = os.environ | ENV | env | {"TMPDIR": f"{folder}/tmp", "PATH": path}

    def start(self) -> "Node":
        """Ray waits 30 s for its parts, which a busy machine may exceed."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *self.words]
        for _ in range(TRIES):
            done = subprocess.run(
                command, env=self.env, cwd=self.folder, capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return self
            self.kill()
        raise AssertionError(done.stdout + done.stderr)

    def processes(self) -> list[psutil.Process]:
        """All that runs on the node but the commands that use it."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("TMPDIR") == f"{self.folder}/tmp":
                    found.append(process)
        return found

    def runs(self, name: str) -> bool:
        """Whether an actor of this class is on the node."""
        for process in self.processes():
            with suppress(psutil.Error):
                if f"ray::{name}" in " ".join(process.cmdline()):
                    return True
        return False

    def kill(self) -> None:
        """SIGKILL, as a power cut."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()

    def holds(self, pattern: str) -> bool:
        """Whether something of this name is in the folders of its workers."""
        return any((self.folder / "tmp").glob(f"flywheel-*/*/{pattern}"))


class Nodes:
    """A head without CPUs, where commands run, and nodes of one CPU."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder, self.env, self.others = folder, env, list[Node]()
        self.address, port = f"127.0.0.1:{free_port()}", free_port()
        self.dashboard = f"http://127.0.0.1:{port}"
        words = ["--head", f"--port={self.address.rpartition(':')[2]}", "--num-cpus=0"]
        words += ["--include-dashboard=true", f"--dashboard-port={port}"]
        self.head = Node(folder / "h", env, *words)

    def add(self) -> Node:
        words = [f"--address={self.address}", "--num-cpus=1"]
        node = Node(self.folder / f"n{len(self.others)}", self.env, *words)
        self.others.append(node)
        return node.start()

    def command(self, said: Path, code: str, *words: str) -> subprocess.Popen:
        """A Python process on the head's machine; what it says goes to a file."""
        with open(said, "w") as stream:
            return subprocess.Popen(
                [sys.executable, "-c", code, *words],
                cwd=ROOT,
                env=os.environ | ENV | self.env,
                stdout=stream,
                stderr=stream,
            )


@contextmanager
def running(env: dict[str, str], count: int) -> Iterator[Nodes]:
    """A head and so many nodes; `env` is added to the environment of everything on them."""
    # Its sockets need a short path.
    with TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        nodes = Nodes(Path(folder), env)
        try:
            nodes.head.start()
            for _ in range(count):
                nodes.add()
            yield nodes
        finally:
            for node in [*nodes.others, nodes.head]:
                node.kill()


def wait_until(found, process: subprocess.Popen, said: Path, seconds: float = 600) -> None:
    """Until `found()`; fails if the process ends before."""
    deadline = time.monotonic() + seconds
    while not found():
        assert process.poll() is None, said.read_text()
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.02)
