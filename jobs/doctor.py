"""What is installed, what this machine can do, whether the tables are sound, and what to do about
each failure.

    flywheel doctor
    flywheel doctor serve.port=8001 work=/data/flywheel

Exit code 1 if something fails. A missing extra is a warning: not every machine serves or trains.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from jobs.base.checks import Check, none_fails, print_checks
from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console
from jobs.machine import resources, software, store_health

CHECKS: list[Callable[[Config], Iterator[Check]]] = [
    software.python_version,
    software.packages,
    software.intruders,
    resources.device,
    software.cpu_faults,
    resources.room,
    resources.memory,
    resources.port,
    store_health.tables,
]


def run(cfg: Config) -> dict[str, Any]:
    """Run every check, print a table, return {"ok": bool, "checks": [...]}."""
    with console.status("looking around"):
        found = [check for look in CHECKS for check in look(cfg)]
    print_checks("flywheel doctor", found)
    return {"ok": none_fails(found), "checks": [asdict(check) for check in found]}


if __name__ == "__main__":
    run_as_module("doctor")
