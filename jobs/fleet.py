"""flywheel fleet [fleet.replicas=2 fleet.port=8000]

Replicas of vLLM behind one endpoint of Ray Serve, on this machine or on the cluster of ray.address,
until Ctrl-C. They start with serve.drafter (as `flywheel serve`, by default the champion). Their
addresses and the file with the token are in <scratch>/fleet.json, where `flywheel rollout` finds
them. A drafter of another shape needs a restart: `rollout` names it in <scratch>/fleet_wanted.json,
and the replicas that it names restart one after the other.
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
from jobs.base.console import console
from jobs.registry.versions import resolve
from jobs.servers.deployment import deploy, make_token

STATE, WANTED = "fleet.json", "fleet_wanted.json"
POLL_SECONDS = 1.0


def run(cfg: Config) -> dict[str, Any]:
    """Serve until Ctrl-C; returns the endpoint and the seconds it ran."""
    started = time.monotonic()
    token = make_token(Path(cfg.serve.token_file or cfg.path("fleet.token")))
    cfg = _with_drafter(cfg)
    endpoint = f"http://{cfg.fleet.host}:{cfg.fleet.port}"
    # Ray starts workers with niceness 15: beside anything else, the servers would hardly run.
    os.environ.setdefault("RAY_worker_niceness", "0")
    with cluster(cfg):
        try:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C; Ray has its own
            book = deploy(cfg, str(token))
            console.print(f"{endpoint}/v1 serves {cfg.target_path}; Ctrl-C stops")
            while True:
                urls = ray.get(book.read.remote())["urls"]
                _write(cfg.path(STATE), endpoint, token, urls)
                _restart_wanted(cfg, book)
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            pass
        finally:
            cfg.path(STATE).unlink(missing_ok=True)
            ray_serve.shutdown()
    return {"ok": True, "endpoint": endpoint, "seconds": round(time.monotonic() - started, 1)}


def _with_drafter(cfg: Config) -> Config:
    """These settings with the champion as drafter if none is named and there is one."""
    if cfg.serve.drafter or resolve(cfg, "champion") is None:
        return cfg
    return cfg.override("serve", drafter="champion")


def _write(file: Path, endpoint: str, token: Path, urls: dict[str, str]) -> None:
    """Replace the state file if it says something else."""
    state = {"endpoint": endpoint, "token_file": str(token), "replicas": sorted(urls.values())}
    text = json.dumps(state, indent=2) + "\n"
    if not file.exists() or file.read_text() != text:
        partial = file.with_name(f".{file.name}.partial")
        partial.write_text(text)
        os.replace(partial, file)


def _restart_wanted(cfg: Config, book: Any) -> None:
    """Pass on what `rollout` wants to be restarted, once."""
    file = cfg.path(WANTED)
    try:
        wanted = json.loads(file.read_text())
        version, urls = str(wanted["version"]), set(wanted["replicas"])
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError) as error:
        console.print(f"{file} is damaged ({error}): removed", style="yellow")
        file.unlink()
        return
    known = ray.get(book.read.remote())["urls"]
    names = [name for name, url in known.items() if url in urls]
    ray.get(book.want.remote(version, names))
    file.unlink()


if __name__ == "__main__":
    run_as_module("fleet")
