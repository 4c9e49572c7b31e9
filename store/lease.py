"""Leases: one holder at a time among all hosts that share a place.

    <place>/<name>/<number>.json    who holds or held it, and until when

Taking a lease creates the object of the next number, which exactly one of several takers can. The
number is a fencing number: it grows with every holder. A holder extends its time while it works. If
it dies, its lease ends when that time has passed, and for takers on the same machine at once. If it
only seemed dead (it was suspended, say), `Lease.check` fails from then on: whoever commits calls it
right before.
"""

import getpass
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store.place import Place

SECONDS = 60.0
"""How long a holder that does not extend its lease keeps it."""
WAIT = 1.5 * SECONDS
"""How long a taker waits for a holder: longer than one that died can keep it."""
JOIN = 10.0
"""How long a holder that gives its lease back waits for an extension that is on its way."""
KEPT = 3
"""Objects of a lease that stay: the latest numbers."""


class Lost(ValueError):
    """The lease has ended or belongs to another holder: nothing may be committed under it."""


@dataclass
class Lease:
    """A held lease. `number` is its fencing number."""

    place: Place
    number: int
    seconds: float
    until: float
    nonce: str
    stopped: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raise Lost unless this process still holds the lease."""
        latest, held = _latest(self.place)
        if latest != self.number or held.get("nonce") != self.nonce or time.time() > self.until:
            raise Lost(
                f"{self.place}: this process held lease {self.number}, but was stopped for longer "
                f"than {self.seconds:g} s; {held.get('who', 'another process')} may have taken "
                "over: nothing was committed, run the same command again"
            )

    def extend(self) -> None:
        """Hold it for another `seconds` from now. Raises Lost as `check`."""
        self.check()
        until = time.time() + self.seconds
        self.place.write(_name(self.number), _held(self.nonce, until))
        self.until = until

    def release(self) -> None:
        """Let others take it at once. If the store is away or full, it ends by itself."""
        self.stopped.set()
        with suppress(Lost, OSError):  # the holder's own error is not to be hidden
            self.check()
            self.place.write(_name(self.number), _held(self.nonce, 0.0))


@contextmanager
def lease(place: Place, wait: float = WAIT, seconds: float = SECONDS) -> Iterator[Lease]:
    """Hold the lease at `place` for the block, waiting up to `wait` seconds for another holder.

    A thread extends it. Raises ValueError naming the holder when the time is up. Clocks of hosts
    must agree to within a few seconds.
    """
    held = take(place, wait, seconds)
    keeper = threading.Thread(target=_keep, args=(held,), daemon=True)
    keeper.start()
    try:
        yield held
    finally:
        held.stopped.set()
        keeper.join(JOIN)  # an extension on its way would come after the release, and last
        held.release()


def take(place: Place, wait: float = WAIT, seconds: float = SECONDS) -> Lease:
    """A lease that nothing extends but `Lease.extend`."""
    deadline = time.monotonic() + wait
    nonce = os.urandom(8).hex()
    while True:
        number, other = _latest(place)
        if time.time() > other.get("until", 0.0) or _is_dead(other):
            until = time.time() + seconds
            place.create(_name(number + 1), _held(nonce, until))
            # Not the result of `create`: if the store answered too late, the object was sent twice.
            # And a taker that was suspended may create a number that was long given up.
            latest, held = _latest(place)
            if (latest, held.get("nonce")) == (number + 1, nonce):
                place.delete([_name(n) for n in range(max(1, number - KEPT), number - KEPT + 2)])
                return Lease(place, number + 1, seconds, until, nonce)
        if time.monotonic() > deadline:
            raise ValueError(_busy(place, number, other, seconds))
        time.sleep(min(0.2, max(0.01, wait / 20)))


def check_latest(place: Place, number: int) -> None:
    """Raise Lost if lease `number` has a successor: for helpers of its holder, on whatever host."""
    latest, held = _latest(place)
    if latest > number:
        raise Lost(
            f"{place}: lease {number} ended, and {held.get('who', 'another process')} has taken "
            "over: nothing more was committed, run the same command again"
        )


def held_leases(places: Place) -> list[str]:
    """Leases below a place that somebody holds now, each with its holder, by name."""
    found = ((name, _latest(places / name)[1]) for name in places.folders())
    held = [(n, h) for n, h in found if time.time() <= h.get("until", 0.0) and not _is_dead(h)]
    return [f"{name} ({other['who']})" for name, other in held]


def who() -> str:
    """user@host, as in leases and promotion records."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        user = f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def _latest(place: Place) -> tuple[int, dict[str, Any]]:
    """(number, content) of the latest object; (0, {}) if there is none."""
    numbers = [int(found.name[:-5]) for found in place.objects() if found.name.endswith(".json")]
    number = max(numbers, default=0)
    data = place.read(_name(number)) if number else None
    with suppress(ValueError):
        held = json.loads(data or b"{}")
        return number, held if isinstance(held, dict) else {}
    return number, {}


def _busy(place: Place, number: int, other: dict[str, Any], seconds: float) -> str:
    ends = max(0.0, other.get("until", 0.0) - time.time())
    todo = "wait for it to end, then try again"
    if ends > 2 * seconds:  # no clock that agrees with ours has written that
        todo = (
            "the clocks of the two differ; correct them, and if that process is gone, remove "
            f"{place}/{_name(number)}"
        )
    return (
        f"{place} is held by {other.get('who', 'another process')} (lease {number}, ends in "
        f"{ends:.0f} s unless it is extended): {todo}"
    )


def _name(number: int) -> str:
    return f"{number:08d}.json"


def _held(nonce: str, until: float) -> bytes:
    value = {"who": f"{who()}, process {os.getpid()}", "until": until, "nonce": nonce}
    return json.dumps(value | {"process": _process()}).encode()


def _process() -> list[Any]:
    """What tells this process from every other: machine since its start, space of process ids,
    process id and its start. Empty where the system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # As text: releases that compared another kind of start kept the number.
        return [boot, os.readlink("/proc/self/ns/pid"), os.getpid(), _start(os.getpid())]
    except OSError:
        return []


def _start(process: int) -> int:
    """When a process started, in ticks since the machine did: setting the clock does not move it.

    It is field 22 of its status; field 2, its name in brackets, may hold blanks and brackets.
    """
    status = Path(f"/proc/{process}/stat").read_bytes()
    return int(status[status.rindex(b")") + 1 :].split()[22 - 3])


def _is_dead(held: dict[str, Any]) -> bool:
    """Whether the holder was a process of this machine that has ended."""
    theirs, ours = held.get("process"), _process()
    if not theirs or theirs[:2] != ours[:2]:
        return False
    try:
        os.kill(theirs[2], 0)
        return _start(theirs[2]) != theirs[3]
    except ProcessLookupError:
        return True
    except OSError:
        return False  # of another user, and /proc may hide it


def _keep(held: Lease) -> None:
    while not held.stopped.wait(held.seconds / 3):
        try:
            held.extend()
        except Lost:
            return  # the holder's next `check` says so
        except OSError:
            continue  # the store may answer again before the lease ends
