"""store.lease: one holder, whoever asks, and none that comes back."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest

from store import lease as lease_module
from store.lease import Lost, lease, take
from store.place import Place, place_of

HOLD = """
import sys, time
from store.lease import take
from store.place import place_of
open("/proc/self/comm", "w").write(") S 1 (")  # the name of a process may hold anything
take(place_of(sys.argv[1]) / "some", seconds=float(sys.argv[2]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def place(work_url) -> Place:
    return place_of(work_url) / "some"


def test_one_of_twenty_takes_it(place):
    def attempt(_: int) -> int:
        try:
            return take(place, wait=0.0).number
        except ValueError:
            return 0

    with ThreadPoolExecutor(20) as pool:
        numbers = list(pool.map(attempt, range(20)))
    assert sorted(numbers)[-2:] == [0, 1]


def test_every_holder_has_a_greater_number(place):
    numbers = []
    for _ in range(7):
        with lease(place) as held:
            held.check()
            numbers.append(held.number)
    assert numbers == list(range(1, 8))
    assert len(list(place.objects())) <= 4, "old ones are removed"


def test_it_is_extended_while_it_is_held(place):
    with lease(place, seconds=0.6) as held:
        time.sleep(1.5)
        held.check()
        with pytest.raises(ValueError, match=r"is held by .*, process \d+"):
            take(place, wait=0.0)
    take(place, wait=0.0)


def test_a_holder_that_comes_back_is_refused(place):
    first = take(place, seconds=0.2)
    time.sleep(0.3)
    second = take(place, wait=0.0)
    for call in (first.check, first.extend):
        with pytest.raises(Lost, match="nothing was committed, run the same command again"):
            call()
    first.release()
    second.check()


def test_a_holder_that_was_stopped_too_long_is_refused_even_alone(place):
    held = take(place, seconds=0.2)
    time.sleep(0.3)
    with pytest.raises(Lost):
        held.check()


def test_a_dead_holder_of_this_machine_frees_it_at_once(place):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, place.root, "60"], stdout=subprocess.PIPE, env=os.environ
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match=f"process {process.pid}"):
        take(place, wait=0.0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert take(place, wait=0.0).number == 2
    process.stdout.close()


def test_a_living_holder_keeps_it_when_the_clock_is_set(place, monkeypatch):
    """Then the time at which the machine started moves in /proc/stat, and psutil adds it."""
    real = psutil._pslinux.boot_time  # pyright: ignore[reportAttributeAccessIssue]
    with lease(place):
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: real() + 1)
        with pytest.raises(ValueError, match="is held by"):
            take(place, wait=0.0)


@pytest.fixture
def clock(monkeypatch):
    """The seconds by which the clock is ahead, in a list; a real one cannot be set in a test."""
    ahead = [0.0]
    fake = SimpleNamespace(
        time=lambda: time.time() + ahead[0], monotonic=time.monotonic, sleep=time.sleep
    )
    monkeypatch.setattr(lease_module, "time", fake)
    return ahead


def test_a_clock_set_forward_ends_a_lease_and_its_holder_commits_nothing(place, clock):
    with lease(place) as first:
        clock[0] = 3600.0
        second = take(place, wait=0.0)
        with pytest.raises(Lost, match="nothing was committed, run the same command again"):
            first.check()
    second.check()


def test_a_clock_set_back_lets_the_holder_go_on(place, clock):
    with lease(place) as held:
        clock[0] = -3600.0
        held.check()
        held.extend()
        with pytest.raises(ValueError, match="wait for it to end"):
            take(place, wait=0.0)
    take(place, wait=0.0)


def test_a_dead_holder_whose_clock_was_ahead_is_removed_by_hand(place, clock, monkeypatch):
    monkeypatch.setattr(lease_module, "_process", list)  # as of another host
    clock[0] = 86_400.0
    dead = take(place)
    clock[0] = 0.0
    with pytest.raises(ValueError, match=r"clocks of the two differ.* remove (.*)$") as told:
        take(place, wait=0.0)
    file = str(told.value).rpartition(" ")[2]
    assert file == f"{place}/00000001.json"
    place.delete(["00000001.json"])
    take(place, wait=0.0).check()
    with pytest.raises(Lost):
        dead.check()


def test_another_process_with_the_number_of_a_dead_holder_does_not_hold_it(place):
    take(place)
    held = json.loads(place.read("00000001.json") or b"")
    held["process"][3] -= 1  # it started a tick before this one
    place.write("00000001.json", json.dumps(held).encode())
    assert take(place, wait=0.0).number == 2


def test_a_holder_of_an_earlier_release_is_not_taken_for_dead(place):
    take(place)
    held = json.loads(place.read("00000001.json") or b"")
    boot, _, process, _ = held["process"]
    held["process"] = [boot, os.stat("/proc/self/ns/pid").st_ino, process, time.time()]
    place.write("00000001.json", json.dumps(held).encode())
    with pytest.raises(ValueError, match="is held by"):
        take(place, wait=0.0)


def test_a_damaged_lease_counts_as_ended(place):
    take(place)
    place.write("00000001.json", b"{half")
    assert take(place, wait=0.0).number == 2
