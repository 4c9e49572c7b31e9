"""Two programs that take turns: a parent sends lines to a worker in another environment, which
answers each with a line.

It needs only the standard library and psutil: the worker also runs where this package is missing.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil


class Worker:
    """The parent's end. `ready` is the first answer, sent when everything is loaded."""

    def __init__(self, name: str, command: Sequence[str | Path], log: Path):
        self.name, self.log = name, log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )
        self.ready = self._answer()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def ask(self, command: str, argument: int | str) -> dict[str, Any]:
        """Send one command and wait for its answer. Raises ValueError if the worker died."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_answer` raises with the reason
            print(json.dumps([command, argument]), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise ValueError(f"the {self.name} worker stopped: {self.log.read_text()[-2000:]}")
        return json.loads(line)


class Lines:
    """The worker's end: iterate over commands, answer each once.

    Takes over file descriptor 1, so that whatever a library prints lands on stderr.
    """

    def __init__(self):
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for line in sys.stdin:
            command, argument = json.loads(line)
            yield command, argument

    def answer(self, **values: Any) -> None:
        """Print one JSON line: `values`, resident bytes now, and the process's peak so far."""
        memory = {"resident": psutil.Process().memory_info().rss, "peak": peak_bytes()}
        print(json.dumps(values | memory), file=self.out, flush=True)


def peak_bytes() -> int:
    """Largest resident set of this process so far.

    On Linux it is read from /proc: ru_maxrss also counts the parent's memory when it forked.
    """
    status = Path("/proc/self/status")
    if not status.is_file():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    [kib] = [line.split()[1] for line in status.read_text().splitlines() if "VmHWM" in line]
    return int(kib) * 1024
