"""flywheel ui [ui.port=8900]

One page in a browser, for people who would rather look: the champion and its history, acceptance
over time, the canary, windows of retraining, triggers, data. It reads the work folder and writes
nothing there. It listens on the loopback interface unless ui.names allows another one, since it has
no password. docs/how-to/read-the-tables.md says more.
"""

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn

from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console
from jobs.looking.looks import Looks
from jobs.looking.web_app import application
from serving.start_checks import free_port


def run(cfg: Config) -> dict[str, Any]:
    """Serve the page until Ctrl-C; returns its address. Raises ValueError for a port in use."""
    port = free_port(cfg.ui.host, cfg.ui.port)
    host = f"[{cfg.ui.host}]" if ":" in cfg.ui.host else cfg.ui.host
    url = f"http://{host}:{port}"
    with tempfile.TemporaryDirectory(
        prefix="ui-of-flywheel-", ignore_cleanup_errors=True
    ) as folder:
        looks = Looks(cfg, Path(folder))
        looks.begin()  # the first page need not wait for all of it
        console.print(f"{url} shows {cfg.place()}; Ctrl-C stops")
        try:
            with suppress(KeyboardInterrupt):
                uvicorn.run(
                    application(cfg, looks),
                    host=cfg.ui.host,
                    port=port,
                    log_level="warning",
                    server_header=False,
                    timeout_graceful_shutdown=3,
                )
        finally:
            looks.close()
    return {"stage": "ui", "url": url}


if __name__ == "__main__":
    run_as_module("ui")
