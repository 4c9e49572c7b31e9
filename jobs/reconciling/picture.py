"""How a roll-out decided, as a picture and as JSON, from its rows in promotions/ alone."""

from typing import Any

from jobs.base.config import Config
from jobs.reconciling.rollout_rows import rows_of_rollout
from jobs.reporting.plotting import Look, sequential_intervals
from store.place import write_json

MOST_PANELS = 6
ENDS = {"rollout-advance": "advanced", "rollout-rollback": "rolled back", "rollout-hold": "held"}


def write_evidence(cfg: Config, number: int) -> str | None:
    """Write <work>/rollouts/<number>.json and .svg; returns the path of the JSON, None without
    such a roll-out.
    """
    rows = rows_of_rollout(cfg, number)
    if not rows:
        return None
    place = cfg.place("rollouts")
    kept = [{**row, "decided_at": row["decided_at"].isoformat()} for row in rows]
    write_json(place, f"{number}.json", {"rollout": number, "rows": kept})
    panels, tolerances = looks(rows)
    if any(panels.values()):
        title = f"version {rows[0]['to_version']} {_end(rows)}"
        place.write(f"{number}.svg", sequential_intervals(title, panels, tolerances).encode())
    return f"{place}/{number}.json"


def looks(rows: list[dict[str, Any]]) -> tuple[dict[str, list[Look]], dict[str, float]]:
    """(looks by slice, tolerance by slice): (answers of the canary, difference, low, high) each.
    A slice with traffic that never had an interval is there without looks: a roll-out may wait for
    it.
    """
    panels: dict[str, list[Look]] = {}
    tolerances: dict[str, float] = {}
    for row in rows:
        verdict = (row["evidence"] or {}).get("verdict") or {}
        for judged in verdict.get("judged", []):
            name = judged["name"]
            if not any(judged["conversations"]) or (
                name not in panels and len(panels) == MOST_PANELS
            ):
                continue
            tolerances[name] = judged["tolerance"]
            points = panels.setdefault(name, [])
            if judged["low"] is not None:
                answers = verdict["answers"][0]
                points.append((answers, judged["difference"], judged["low"], judged["high"]))
    return panels, tolerances


def _end(rows: list[dict[str, Any]]) -> str:
    """What became of it, and why."""
    ends = [row for row in rows if row["action"] in ENDS]
    return f"{ENDS[ends[-1]['action']]}: {ends[-1]['reason']}" if ends else "is not decided"
