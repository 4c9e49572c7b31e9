"""flywheel fleet [fleet.replicas=2 fleet.port=8000]

Replicas of vLLM behind one endpoint of Ray Serve, on this machine, until Ctrl-C. They start with
serve.drafter (as `flywheel serve`, by default the champion). Their addresses and the name of the
file with the token are in <scratch>/fleet_state.json, where `flywheel rollout` finds them; the
addresses are in fleet_targets.json, too, as Prometheus reads them (file_sd_configs). A drafter of
another shape needs a restart: `rollout` names it in <scratch>/fleet_wanted.json, and the replicas
that it names restart one after the other.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import ray
from ray import serve as ray_serve

from jobs.base.cli import run_as_module
from jobs.base.cluster import cluster
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.reconciling.observed import FLEET_STATE, FLEET_WANTED, find_fleet, observe
from jobs.registry.versions import resolve
from jobs.servers.deployment import STICKY_HEADER, deploy, make_token, read_book

FLEET_TARGETS = "fleet_targets.json"
POLL_SECONDS = 1.0


def run(cfg: Config) -> dict[str, Any]:
    """Serve until Ctrl-C; returns the endpoint and the seconds it ran. With fleet.action=status,
    what each replica says. Raises ValueError where the replicas do not start, or none is known.
    """
    if cfg.fleet.action == "status":
        return _status(cfg)
    started = time.monotonic()
    token = make_token(Path(cfg.serve.token_file or cfg.path("fleet.token")))
    cfg = _with_drafter(cfg)
    endpoint = f"http://{cfg.fleet.host}:{cfg.fleet.port}"
    # Ray starts workers with niceness 15: beside anything else, the servers would hardly run.
    for name, value in {"RAY_worker_niceness": "0", **STICKY_HEADER}.items():
        os.environ.setdefault(name, value)
    with cluster(cfg):
        try:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C; Ray has its own
            book = deploy(cfg, str(token))
            console.print(f"{endpoint}/v1 serves {cfg.target_path}; Ctrl-C stops")
            while True:
                _tell(cfg, endpoint, token, sorted(read_book(book)["urls"].values()))
                _restart_wanted(cfg, book)
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            pass
        finally:
            for name in (FLEET_STATE, FLEET_TARGETS):
                cfg.path(name).unlink(missing_ok=True)
            ray_serve.shutdown()
    return {"ok": True, "endpoint": endpoint, "seconds": round(time.monotonic() - started, 1)}


def _status(cfg: Config) -> dict[str, Any]:
    seen = observe(cfg, find_fleet(cfg))
    rows = [
        [one.url, one.label, said.get("state"), said.get("swaps"), one.fault or said.get("fault")]
        for one in seen
        for said in [one.status or {}]
    ]
    print_table("Replicas", ["replica", "drafts with", "state", "changes", "fault"], rows)
    found = {one.url: {"drafter": one.label, "fault": one.fault} for one in seen}
    return {"stage": "fleet", "ok": all(one.status for one in seen), "replicas": found}


def _with_drafter(cfg: Config) -> Config:
    """These settings with the champion as drafter if none is named and there is one."""
    if cfg.serve.drafter or resolve(cfg, "champion") is None:
        return cfg
    return cfg.override("serve", drafter="champion")


def _tell(cfg: Config, endpoint: str, token: Path, urls: list[str]) -> None:
    """Write where the replicas are, for `rollout` and for Prometheus."""
    state = {"endpoint": endpoint, "token_file": str(token), "replicas": urls}
    targets = [{"targets": [url.removeprefix("http://") for url in urls]}]
    for file, said in ((cfg.path(FLEET_STATE), state), (cfg.path(FLEET_TARGETS), targets)):
        text = json.dumps(said, indent=2) + "\n"
        if not file.exists() or file.read_text() != text:
            partial = file.with_name(f".{file.name}.partial")
            partial.write_text(text)
            os.replace(partial, file)


def _restart_wanted(cfg: Config, book: Any) -> None:
    """Pass on what `rollout` wants to be restarted, once."""
    file = cfg.path(f"{FLEET_WANTED}.taken")
    try:
        os.replace(cfg.path(FLEET_WANTED), file)  # what is asked from now on is another file
        asked = json.loads(file.read_text())["replicas"].items()
        wanted = {url: str(drafter["version"] or "none") for url, drafter in asked}
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        console.print(f"{file} is damaged ({error}): removed", style="yellow")
        file.unlink()
        return
    file.unlink()
    names = read_book(book)["urls"]
    for name, url in names.items():
        if url in wanted:
            ray.get(book.want.remote(name, wanted[url]))


if __name__ == "__main__":
    run_as_module("fleet")
