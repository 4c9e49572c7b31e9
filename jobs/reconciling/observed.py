"""Which replicas there are, and what each says that it has loaded."""

import json
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.base.config import Config
from serving.replica_client import ReplicaClient, ReplicaFault, find_token

FLEET_STATE, FLEET_WANTED = "fleet_state.json", "fleet_wanted.json"
"""Files in scratch: what `flywheel fleet up` runs, and what it shall restart replicas with."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The replicas by URL, in order, and their token. `ours`: `flywheel fleet up` runs them, so
    that it can restart them.
    """

    urls: list[str]
    token: str
    ours: bool

    def client(self, url: str, cfg: Config) -> ReplicaClient:
        """A client of one replica."""
        return ReplicaClient(url, self.token, cfg.rollout.timeout)


@dataclass(frozen=True, slots=True)
class Observed:
    """One replica: what it says, or why it says nothing."""

    url: str
    status: dict[str, Any] | None
    fault: str = ""

    @property
    def active(self) -> dict[str, Any]:
        """The drafter that it drafts with; empty for none."""
        return (self.status or {}).get("active") or {}

    @property
    def sha256(self) -> str:
        """The identity of that drafter as loaded; empty without one."""
        return str(self.active.get("sha256") or "")

    @property
    def target_id(self) -> str:
        """The target that it serves."""
        return str((self.status or {}).get("target_id") or "")

    @property
    def label(self) -> str:
        """What it drafts with, for people."""
        if self.status is None:
            return "unreachable"
        version = str(self.active.get("version") or "")
        return f"{version}/{self.sha256[:12]}" if self.sha256 else "none"


def has_fleet(cfg: Config) -> bool:
    """Whether any replicas are known."""
    known = cfg.rollout.replicas or cfg.rollout.dns
    return bool(known) or cfg.path(FLEET_STATE).is_file()


def find_fleet(cfg: Config) -> Fleet:
    """The replicas of the settings, else those of `flywheel fleet up`. ValueError without any."""
    urls, token, ours = list(cfg.rollout.replicas), cfg.rollout.token_file, False
    if not urls and cfg.rollout.dns:
        urls = _addresses(cfg.rollout.dns)
    file = cfg.path(FLEET_STATE)
    if not urls and file.is_file():
        state = _state(file)
        urls, ours = list(state["replicas"]), True
        token = token or str(state.get("token_file") or "")
    if not urls:
        raise ValueError(
            "no replica is known: set rollout.replicas or rollout.dns, or start some with "
            "`flywheel fleet up`"
        )
    unique = dict.fromkeys(url.rstrip("/") for url in urls)
    return Fleet(list(unique), find_token(token), ours)


def _state(file: Path) -> dict[str, Any]:
    try:
        state = json.loads(file.read_text())
        if not all(isinstance(url, str) for url in state["replicas"]):
            raise TypeError("replicas are no URLs")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}): run `flywheel fleet up` again") from error
    return state


def _addresses(name: str) -> list[str]:
    host, _, port = name.rpartition(":")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # Unicode: no host can have such a name
        raise ValueError(f"rollout.dns = {name!r}: {error}: is the name right?") from error
    hosts = sorted({str(address[0]) for _, _, _, _, address in found})
    return [f"http://[{h}]:{port}" if ":" in h else f"http://{h}:{port}" for h in hosts]


def observe(cfg: Config, fleet: Fleet) -> list[Observed]:
    """Ask every replica, all at once; the order is that of the fleet."""

    def ask(url: str) -> Observed:
        try:
            with fleet.client(url, cfg) as client:
                return Observed(url, client.status())
        except ReplicaFault as error:
            return Observed(url, None, str(error))

    with ThreadPoolExecutor(max_workers=max(1, min(16, len(fleet.urls)))) as pool:
        return list(pool.map(ask, fleet.urls))


def majority(seen: Sequence[Observed]) -> str | None:
    """The drafter that most of the reachable ones have loaded; None if none answers."""
    shas = sorted(one.sha256 for one in seen if one.status is not None)
    return max(dict.fromkeys(shas), key=shas.count, default=None)
