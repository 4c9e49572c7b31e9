"""Run vLLM with the target and, if named, a drafter, until Ctrl-C.

flywheel serve --config my.yaml serve.drafter=champion serve.capture=runs/my/capture
python -m jobs.serve serve.port=8001
"""

import time
from typing import Any

from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console
from jobs.servers.configured import server
from serving.vllm_server import SERVED_NAME


def run(cfg: Config) -> dict[str, Any]:
    """Serve until Ctrl-C or until vLLM ends; returns the URL, K and the seconds it ran."""
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


if __name__ == "__main__":
    run_as_module("serve")
