"""flywheel watch [--plan] [watch.run=true] [watch.stay=true] [watch.policy=FILE]

Is it time to retrain? Ingests, looks at every trigger of the policy once, prints a table and exits:
0 nothing fires, 4 something does. With watch.run it starts `flywheel retrain` there; with
watch.stay it looks again every watch.poll seconds. With --plan it only looks: nothing is ingested.
docs/how-to/retrain.md explains the triggers.
"""

import time
from typing import Any

from jobs import ingest
from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console
from jobs.base.stage_log import logged
from jobs.retraining.policy import Policy, read_policy
from jobs.retraining.triggers import as_rows, look, show
from pipelines import retrain

FIRED = 4
"""Exit code: a trigger fires, and nothing was started."""
LONGEST_WAIT = 3600.0
"""Seconds between two looks, at most, after faults."""


def run(cfg: Config) -> dict[str, Any]:
    """Look once, or for ever with `watch.stay`; returns the triggers, and the window if one ran.

    Raises ValueError for a policy that cannot be read; with watch.stay, any other fault is told
    once and tried again.
    """
    policy = read_policy(cfg.watch.policy)
    return _stay(cfg, policy) if cfg.watch.stay else _once(cfg, policy)


def plan(cfg: Config) -> dict[str, Any]:
    """What every trigger sees in what is ingested now; starts nothing and writes nothing."""
    found = look(cfg, read_policy(cfg.watch.policy))
    show(found)
    return {"stage": "watch", "plan": as_rows(found)}


def _once(cfg: Config, policy: Policy) -> dict[str, Any]:
    logged(cfg, "ingest", ingest.run)
    found = look(cfg, policy)
    show(found)
    summary = {"stage": "watch", "triggers": as_rows(found)}
    if not any(one.fires for one in found):
        return summary
    if not cfg.watch.run:
        console.print("it is time to retrain: `flywheel retrain`")
        return summary | {"exit": FIRED}
    done = retrain.run(cfg)
    return summary | {"retrain": done, "exit": done.get("exit", 0)}


def _stay(cfg: Config, policy: Policy) -> dict[str, Any]:
    """Until Ctrl-C. After a fault it waits longer and longer: the store may be away for hours."""
    told, wait, last = "", cfg.watch.poll, {"stage": "watch"}
    while True:
        try:
            last, told, wait = _once(cfg, policy), "", cfg.watch.poll
        except KeyboardInterrupt:
            return last
        except (ValueError, OSError) as error:
            wait = min(2 * wait, max(LONGEST_WAIT, cfg.watch.poll))
            if str(error) != told:
                console.print(f"note: {error}; it is tried again")
            told = str(error)
        try:
            time.sleep(wait)
        except KeyboardInterrupt:
            return last


if __name__ == "__main__":
    run_as_module("watch")
