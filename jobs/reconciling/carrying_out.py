"""Giving a replica a drafter, and making sure that it has it."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.base.config import Config
from jobs.base.console import console
from jobs.reconciling.next_steps import Named
from jobs.reconciling.observed import FLEET_WANTED, Fleet, find_fleet, observe
from jobs.registry.versions import Registry, Version
from serving.replica_client import (
    Failed,
    NeedsRestart,
    Refused,
    ReplicaClient,
    ReplicaFault,
    Unreachable,
)

TRIES = 2
"""Activations that may fail before a drafter counts as one that cannot be served."""


class CannotServe(ValueError):
    """This drafter does not run on this replica, whatever is tried."""


class Died(Unreachable):
    """A replica stopped answering while it exchanged its drafter: it was killed, or this drafter
    killed it.
    """


def bring(cfg: Config, fleet: Fleet, registry: Registry, url: str, drafter: Named) -> bool:
    """Make replica `url` draft with `drafter`; returns whether it needed a restart.

    Raises CannotServe for a drafter that it refuses or does not run after all, ReplicaFault for a
    replica that does not answer, and ValueError for a version that cannot be opened.
    """
    version = _version(registry, drafter)
    folder = registry.open(version) if version else None
    target_id = version.compat["target_id"] if version else ""
    with fleet.client(url, cfg) as client:
        try:
            _swap(client, drafter, folder, target_id)
            return False
        except NeedsRestart as error:
            # By its number in the registry: whoever starts it may not know the name it had before.
            numbered = Named(version.number, version.sha256) if version else drafter
            _restart(cfg, fleet, client, numbered, error)
            return True
        except Refused as error:
            raise CannotServe(str(error)) from error


def _version(registry: Registry, drafter: Named) -> Version | None:
    if not drafter.sha256:
        return None
    version = registry.get(drafter.version) if drafter.version.isdigit() else None
    if version is None or version.sha256 != drafter.sha256:
        version = registry.find(drafter.sha256)  # it was started with a folder, not with a version
    if version is None:
        raise ValueError(
            f"{drafter} is not in the registry (deleted, or never registered): a replica cannot be "
            "given it; promote or roll back to a version that is there"
        )
    return version


def _swap(client: ReplicaClient, drafter: Named, folder: Path | None, target_id: str) -> None:
    for number in range(1, TRIES + 1):
        # A delivery that fails (a full disk, say) tells nothing about the drafter.
        staged = (client.status().get("staged") or {}).get("sha256")
        if folder is not None and staged != drafter.sha256:
            client.deliver(folder, drafter.version, drafter.sha256, target_id)
        try:
            client.activate(drafter.sha256)
        except Unreachable as error:
            raise Died(str(error)) from error
        except Failed as error:
            if number == TRIES:
                raise CannotServe(str(error)) from error
            continue
        found = client.status()
        active = found.get("active") or {}
        if (active.get("sha256") or "") == drafter.sha256 and found["state"] == "ready":
            return
        if number == TRIES:
            sha = str(active.get("sha256") or "none")[:12]
            raise CannotServe(
                f"{client.url} says that it drafts with {sha} ({found['state']}) after it was "
                f"given {drafter}"
            )


def _restart(
    cfg: Config, fleet: Fleet, client: ReplicaClient, drafter: Named, error: NeedsRestart
) -> None:
    """Have a replica of `flywheel fleet up` restarted, and wait for it."""
    if not fleet.ours:
        raise ReplicaFault(
            f"{error}: start this replica again with {drafter} (serve.drafter={drafter.version}), "
            "then run the same command again"
        )
    ask_restart(cfg, client.url, drafter)
    console.print(f"{client.url} restarts with {drafter}")
    until = time.monotonic() + cfg.rollout.restart_wait
    while time.monotonic() < until:
        present = find_fleet(cfg)
        # The new server starts beside the old one, at an address of its own.
        mine = [url for url in present.urls if url == client.url or url not in fleet.urls]
        if any(one.sha256 == drafter.sha256 for one in observe(cfg, replace(present, urls=mine))):
            return
        time.sleep(min(1.0, cfg.rollout.poll))
    raise ReplicaFault(
        f"{client.url} did not come back with {drafter} within rollout.restart_wait "
        f"{cfg.rollout.restart_wait} s: is `flywheel fleet up` running?"
    )


def ask_restart(cfg: Config, url: str, drafter: Named) -> None:
    """Write down what a replica of `flywheel fleet up` shall be started with."""
    file = cfg.path(FLEET_WANTED)
    known: dict[str, Any] = {}
    if file.is_file():
        known = json.loads(file.read_text()).get("replicas", {})
    known[url] = {"version": drafter.version, "sha256": drafter.sha256}
    partial = file.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps({"replicas": known}, indent=1) + "\n")
    os.replace(partial, file)
