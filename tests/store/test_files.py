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

    with pytest.raises(
        OSError, match=r"No space left on device: free some space, .*: '.*/a\.json'"
    ):
        commit(tmp_path / "a.json", full)
    assert list(tmp_path.iterdir()) == []


# Every write fails from a moment on, as on a full disk: the system allows no byte in any file.
FULL = """
import resource, sys
import pyarrow as pa
from store.files import commit
from store.lease import take
from store.place import place_of
from store.tables import Table
folder = place_of(sys.argv[1])
table = Table(folder / "table", pa.schema([("n", pa.int32())]))
rows = [table.write(pa.table({"n": pa.array([n], pa.int32())})) for n in (1, 2)]
table.change(lambda live: (rows[:1], []))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
for write in (
    lambda: table.write(pa.table({"n": pa.array([3], pa.int32())})),
    lambda: table.change(lambda live: (rows[1:], [])),
    lambda: take(folder / "lease"),
    lambda: folder.create("one.json", b"{}"),
    lambda: commit(folder.path / "state.pt", lambda stream: stream.write(b"12")),
):
    try:
        write()
    except OSError as error:
        print(f"{error.filename}: {error.strerror}")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
table.change(lambda live: (rows[1:], []))
print(sorted(table.read()["n"].to_pylist()), take(folder / "lease").number)
"""


def test_a_full_disk_is_one_message_of_tables_and_leases(tmp_path):
    """It names the file and says what to do, leaves nothing, and all goes on when there is room."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True
    )
    *messages, end = done.stdout.splitlines()
    todo = ": File too large: free some space, then run the same command again"
    assert len(messages) == 5, done.stdout
    assert all(message.endswith(todo) for message in messages), messages
    named = [message.removesuffix(todo).removeprefix(f"{tmp_path}/") for message in messages]
    assert named[0].startswith("table/")
    assert named[1:] == ["table", "lease/00000001.json", "one.json", "state.pt"]
    assert end == "[1, 2] 1"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.stat().st_size for path in files), files
    assert len(files) == 2 + 3 + 1  # shards, commits, the lease


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
