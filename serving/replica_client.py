"""Talking to one replica: what it says it runs, and how it is given another drafter.

The protocol is that of serving/replica.py. A fault is one of four errors, each with one message
that names the replica; none of them holds the token.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any, Self

import httpx

from dflash.checkpoint import engine_files
from serving.start_checks import check_token, read_token

TOKEN = "FLYWHEEL_TOKEN"  # the name of the environment variable, not a token
LOOK_SECONDS = 10.0
"""How long a replica may take to say how it is."""
MOST_BYTES = 64 << 20
"""Of an answer; a full feed has less than a tenth of it."""


class ReplicaFault(OSError):
    """A replica could not do what it was asked."""


class Unreachable(ReplicaFault):
    """No answer: it is down, hangs or restarts. What it did is unknown until it is asked again."""


class Denied(ReplicaFault):
    """The token is wrong or missing."""


class NeedsRestart(ReplicaFault):
    """Right target, another shape: only a new process can serve this drafter."""


class Refused(ReplicaFault):
    """This drafter can never be served there."""


class Failed(ReplicaFault):
    """It tried and could not; it says that it serves what it served before."""


def find_token(file: Path | str = "") -> str:
    """The token in a file, else in the environment; empty without one. ValueError for a bad one."""
    if file:
        return read_token(file).decode()
    token = os.environ.get(TOKEN, "").strip()
    if token:
        check_token(token.encode(), f"the environment variable {TOKEN}")
    return token


class ReplicaClient:
    """One replica. `timeout`: seconds that a load or an activation may take."""

    def __init__(self, url: str, token: str, timeout: float = 120.0):
        self.url, self.timeout = url.rstrip("/"), timeout
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # No proxy of the environment: the token is for the replica only.
        self.http = httpx.Client(headers=headers, trust_env=False, follow_redirects=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()

    def status(self) -> dict[str, Any]:
        """What it runs and how it is (GET /flywheel/replica)."""
        found = self._ask("GET", "/flywheel/replica", seconds=LOOK_SECONDS)
        if missing := {"target_id", "state", "active"} - set(found):
            raise Failed(f"{self.url}: its status lacks {', '.join(sorted(missing))}")
        kinds = {"target_id": str, "state": str}
        odd = [name for name, kind in kinds.items() if not isinstance(found[name], kind)]
        odd += [name for name in ("active", "staged") if not _is_drafter(found.get(name))]
        if odd:
            raise Failed(f"{self.url}: its status has an odd {', '.join(odd)}")
        return found

    def deliver(self, folder: Path, version: str, sha256: str, target_id: str) -> dict[str, Any]:
        """Send a drafter's files and have them loaded beside the running one; returns `staged`.
        `target_id`: what it was trained for.
        """
        for file in engine_files(folder):
            where = f"/flywheel/drafters/{sha256}/{file.name}"
            # As bytes of a file: httpx streams it, and a drafter may have gigabytes.
            with open(file, "rb") as stream:
                self._ask("PUT", where, content=stream)
        wanted = {"version": version, "sha256": sha256, "target_id": target_id}
        return self._ask("POST", "/flywheel/load", json=wanted).get("staged") or {}

    def activate(self, sha256: str) -> dict[str, Any]:
        """Draft with the staged drafter from now on; with none for an empty `sha256`."""
        return self._ask("POST", "/flywheel/activate", json={"sha256": sha256})

    def drop(self) -> None:
        """Forget the staged drafter."""
        self._ask("POST", "/flywheel/drop", json={})

    def acceptance(self, after: int) -> dict[str, Any]:
        """The finished requests after number `after`, and counters (GET /flywheel/acceptance). What
        a row holds is not checked.
        """
        params = {"after": str(after)}
        found = self._ask("GET", "/flywheel/acceptance", seconds=LOOK_SECONDS, params=params)
        rows, counts = found.get("rows"), [found.get(n) for n in ("next", "requests", "failed")]
        counts += [found.get("lost", 0)]
        sound = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
        sound &= all(type(count) is int and count >= 0 for count in counts)
        started = found.get("started")
        if not sound or not isinstance(started, int | float) or not math.isfinite(started):
            raise Failed(f"{self.url}: its acceptance is not what the protocol says")
        return found

    def _ask(
        self, method: str, where: str, seconds: float | None = None, **more: Any
    ) -> dict[str, Any]:
        limit = self.timeout if seconds is None else min(seconds, self.timeout)
        late, body = f"{self.url} did not answer within {limit:g} s", bytearray()
        try:
            with self.http.stream(method, f"{self.url}{where}", timeout=limit, **more) as answer:
                until = time.monotonic() + limit  # httpx limits each read only
                for part in answer.iter_bytes():
                    body += part
                    if time.monotonic() > until:
                        raise Unreachable(late)
                    if len(body) > MOST_BYTES:
                        raise Failed(f"{self.url}: its answer has more than {MOST_BYTES} bytes")
        except httpx.TimeoutException as error:
            raise Unreachable(late) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreachable(f"{self.url} cannot be reached: {error or type(error)}") from error
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            found = {"error": f"no JSON object in its answer to {method} {where}"}
            if answer.is_success:
                raise Failed(f"{self.url}: {found['error']}")
        if answer.is_success:
            return found
        raise _fault(answer.status_code, found)(
            f"{self.url}: {_words(found)} (HTTP {answer.status_code} to {method} {where})"
        )


def _fault(code: int, found: dict[str, Any]) -> type[ReplicaFault]:
    if code in (401, 403):
        return Denied
    if code == 409 and found.get("restart"):
        return NeedsRestart
    if code == 422:
        return Refused
    if code in (502, 503, 504):  # of a balancer before it, or of a server that starts
        return Unreachable
    return Failed


def _is_drafter(said: Any) -> bool:
    """Whether this is what a replica says of a drafter, or None for none."""
    if said is None:
        return True
    if not isinstance(said, dict) or not isinstance(said.get("compat", {}), dict):
        return False
    return all(isinstance(said.get(name), str) for name in ("version", "sha256"))


def _words(found: dict[str, Any]) -> str:
    """The error of an answer, cut."""
    return str(found.get("error") or "no reason given")[:500]
