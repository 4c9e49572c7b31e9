"""A worker in another process: what it prints, what it answers, what is said when it dies."""

import sys
from pathlib import Path

import pytest

from bench.lines import Worker

ECHO = """
from bench.lines import Lines
lines = Lines()
print("a library talks")
lines.answer(ready=True)
for command, argument in lines:
    if command == "die":
        raise RuntimeError("no such step")
    lines.answer(twice=2 * argument)
"""


def test_stdout_of_a_library_does_not_reach_the_parent(tmp_path: Path):
    log = tmp_path / "log"
    with Worker("echo", [sys.executable, "-c", ECHO], log) as worker:
        assert worker.ready["ready"]
        answer = worker.ask("step", 21)
    assert answer["twice"] == 42
    assert answer["peak"] >= answer["resident"] > 1 << 20
    assert "a library talks" in log.read_text()
    assert worker.process.returncode == 0


def test_a_dead_worker_is_named_with_its_last_words(tmp_path: Path):
    with (
        Worker("echo", [sys.executable, "-c", ECHO], tmp_path / "log") as worker,
        pytest.raises(ValueError, match=r"echo worker stopped: [\s\S]*no such step"),
    ):
        worker.ask("die", 0)


def test_the_peak_of_a_worker_is_not_that_of_a_large_parent(tmp_path: Path):
    """ru_maxrss would be: it survives fork and exec."""
    ballast = bytearray(300 << 20)
    with Worker("echo", [sys.executable, "-c", ECHO], tmp_path / "log") as worker:
        assert worker.ready["peak"] < 200 << 20 < len(ballast)
