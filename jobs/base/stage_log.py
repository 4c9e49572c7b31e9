"""The table stages: what was run on a work folder, when, by whom, and what came of it."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from jobs.base.config import Config
from jobs.base.console import console
from store.lease import who
from store.place import first_line
from store.schemas import STAGES

LOGGED = (
    "ingest",
    "select",
    "harvest",
    "train",
    "evaluate",
    "preflight",
    "promote",
    "rollback",
    "rollout",
    "verify",
    "methods",
    "migrate",
    "gc",
    "cache",
)
"""Stages that change a work folder."""
LONGEST = 100_000
"""Most characters of a summary."""

Summary = dict[str, Any]


def logged(cfg: Config, stage: str, run: Callable[[Config], Summary]) -> Summary:
    """`run(cfg)`, and a row about it if `stage` changes the work folder, also if it raises."""
    if stage not in LOGGED:
        return run(cfg)
    started = datetime.now(UTC)
    try:
        summary = run(cfg)
    except Exception as error:
        cause = getattr(error, "cause", None)  # Ray wraps a task's error in a remote traceback
        told = first_line(cause if isinstance(cause, Exception) else error)
        place = cfg.place()
        if not place.is_local or place.path.is_dir():  # a misspelled work folder stays absent
            _add(cfg, stage, started, False, {"error": told}, quiet=isinstance(error, OSError))
        raise
    _add(cfg, stage, started, summary.get("ok", True), summary)
    return summary


def shortened(summary: Summary) -> str:
    """A summary as JSON of at most LONGEST characters. If it is longer, `cut` names the values that
    were left out, the longest first.
    """
    parts = {name: json.dumps(value) for name, value in summary.items()}
    cut: list[str] = []
    text = json.dumps(summary)
    while len(text) > LONGEST and parts:
        cut.append(max(parts, key=lambda name: len(parts[name])))
        del parts[cut[-1]]
        text = json.dumps({name: summary[name] for name in parts} | {"cut": cut})
    return text


def _add(
    cfg: Config, stage: str, started: datetime, ok: bool, summary: Summary, quiet: bool = False
) -> None:
    """Add a row. quiet: the stage's own error will say why it cannot be added."""
    row = {
        "stage": stage,
        "started_at": started,
        "finished_at": datetime.now(UTC),
        "ok": ok,
        "who": who(),
    }
    try:
        row["summary"] = shortened(summary)
        cfg.table("stages").append(pa.Table.from_pylist([row], schema=STAGES))
    except Exception as error:  # noqa: BLE001 (a stage that has ended is not undone by its note)
        if not quiet:
            told = first_line(error)
            console.print(f"note: {stage} was not noted in {cfg.place('stages')}: {told}")
