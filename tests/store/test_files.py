"""Files of the scratch folder: nothing half-written is ever at a final name."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from store.files import commit, sweep


def start(code, *args):
    process = subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_full_disk_is_named_with_the_file(tmp_path):
    def full(stream):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: '.*/a\.json'"):
        commit(tmp_path / "a.json", full)
    assert list(tmp_path.iterdir()) == []


def test_failing_writer_leaves_nothing(tmp_path):
    def fail(stream):
        stream.write(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        commit(tmp_path / "x.pt", fail)
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys, pathlib
from store import files
folder = pathlib.Path(sys.argv[1])
print("go", flush=True)
for i in range(10_000):
    files.commit(folder / f"{i:05d}", lambda stream: [stream.write(bytes(1000)) for _ in range(50)])
"""


@pytest.mark.parametrize("delay", [0.0, 0.011, 0.05, 0.13])
def test_kill_9_never_leaves_a_half_written_file_at_a_final_name(tmp_path, delay):
    process = start(WRITER, str(tmp_path))
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    sweep(tmp_path)
    assert all(path.stat().st_size == 50_000 for path in tmp_path.iterdir())


HOLDER = """
import sys, pathlib, time
from store import files
def slow(stream):
    stream.write(b"half")
    print("go", flush=True)
    time.sleep(60)
files.commit(pathlib.Path(sys.argv[1]), slow)
"""


def test_sweep_keeps_a_live_writers_temporary_and_removes_a_dead_ones(tmp_path):
    process = start(HOLDER, str(tmp_path / "x.pt"))
    assert sweep(tmp_path) == 0
    assert len(list(tmp_path.glob(".x.pt.*"))) == 1
    process.kill()
    process.wait()
    assert sweep(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []
