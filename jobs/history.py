"""flywheel history

Every decision about champions, oldest first: who, when, what, with which numbers, why, and which
drafter came from which. It reads <work>/promotions and the tags of the versions in the registry.
"""

from typing import Any

from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table, short_name, visible
from jobs.promotion.lineage import BASE
from jobs.registry.versions import opened
from jobs.tracking.mlflow_client import MlflowFault
from store import promotions
from store.ids import drafter_version

Row = dict[str, Any]
COLUMNS = ["#", "when (UTC)", "who", "action", "version", "drafter", "from", "tau", "95 %", "gain"]
REASON = 200
"""Characters of a reason that are shown; the JSON line has all of it."""


def run(cfg: Config) -> dict[str, Any]:
    """Print the decisions and the family of the drafters; returns both. A registry that does not
    answer costs the family only: the decisions are in the work folder.
    """
    bases = _bases(cfg)
    rows = [_row(record, bases) for record in promotions.read(cfg.table("promotions"))]
    lines = [[row[name] for name in ("number", "when", "who", "action")] for row in rows]
    for line, row in zip(lines, rows, strict=True):
        ends = row["tau_ci"] and "{:.3f} .. {:.3f}".format(*row["tau_ci"])
        line += [row["version"], row["drafter"], row["base"], row["tau"], ends, row["gain"]]
    print_table(f"Decisions in {cfg.place('promotions')}", COLUMNS, lines, most=None)
    for row in rows:
        console.print(f"{row['number']}, {row['action']}: {visible(row['reason'] or '', REASON)}")
    family = tree(bases)
    if family:
        console.print("which drafter came from which:")
        for line in family:
            console.print(f"  {line}")
    return {"stage": "history", "decisions": rows, "bases": bases, "family": family}


def tree(bases: dict[str, str | None]) -> list[str]:
    """{drafter: its base or None} as indented lines, each base above what came from it. A base that
    is not in the registry stands alone.
    """
    children: dict[str | None, list[str]] = {}
    for name, base in bases.items():
        children.setdefault(base, []).append(name)
    roots = [name for name in children if name is not None and name not in bases]
    lines: list[str] = []
    waiting = [(name, 0) for name in reversed([*children.get(None, []), *roots])]
    while waiting:
        name, depth = waiting.pop()
        mark = "" if name in bases else " (not in the registry)"
        lines.append(f"{'  ' * depth}{short_name(name)}{mark}")
        waiting += [(child, depth + 1) for child in reversed(children.get(name, []))]
    return lines


def _row(record: Row, bases: dict[str, str | None]) -> Row:
    evidence = record["evidence"] or {}
    tau, baseline = evidence.get("tau") or {}, evidence.get("baseline") or {}
    return {
        "number": record["number"],
        "when": record["decided_at"].strftime("%Y-%m-%d %H:%M:%S"),
        "who": record["who"],
        "action": record["action"],
        "version": record["to_version"],
        "drafter": record["to_drafter"],
        "champion_before": record["from_version"],
        "base": bases.get(record["to_drafter"]),
        "tau": tau.get("pooled"),
        "tau_ci": tau.get("ci"),
        "gain": baseline.get("delta"),
        "gain_ci": baseline.get("delta_ci"),
        "k_by_batch_size": evidence.get("k_by_batch_size"),
        "rollout": evidence.get("rollout"),
        "reason": record["reason"],
    }


def _bases(cfg: Config) -> dict[str, str | None]:
    """{drafter: the drafter that its training began with} of all versions, oldest first."""
    try:
        registry = opened(cfg)
        found = registry.all_tags() if registry else []
    except MlflowFault as error:
        console.print(f"note: which drafter came from which is not known: {error}")
        return {}
    return {
        drafter_version(sha256): drafter_version(tags[BASE]) if BASE in tags else None
        for sha256, tags in found
    }


if __name__ == "__main__":
    run_as_module("history")
