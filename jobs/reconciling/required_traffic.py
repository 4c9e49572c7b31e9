"""How much traffic a decision needs, from the spread between conversations in the evaluation."""

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from jobs.base.config import Config
from jobs.base.console import console, print_table, short_name
from jobs.base.sections.rolling_out import Rollout
from jobs.reconciling.sequential import conversations_needed
from jobs.reconciling.three_answers import OVERALL
from store.place import newest_json

Fields = dict[str, Any]
MOST_SLICES = 20


def find_evaluation(cfg: Config, sha256: str) -> Fields | None:
    """The newest evaluation of a drafter; None if there is none."""
    found = newest_json(cfg.place("evaluations"), ["tau"])
    return next((one for one in found if one.get("drafter_sha256") == sha256), None)


def judged_domains(evaluation: Fields | None, limits: Rollout) -> list[str]:
    """The domains that are judged on their own: those with `rollout.min_share` of the evaluated
    rounds, the largest first. They are fixed before the first answer is looked at.
    """
    found = _domains(evaluation)
    rounds = {name: float(one.get("rounds") or 0) for name, one in found.items()}
    total = sum(rounds.values())
    large = [n for n, count in rounds.items() if total and count >= limits.min_share * total]
    return sorted(large, key=lambda name: (-rounds[name], name))[:MOST_SLICES]


def required(
    evaluation: Fields | None, slices: list[str], limits: Rollout, others: int
) -> list[Fields]:
    """Per slice: conversations of the canary until a drafter as good as the rest advances, and
    until one that loses twice the tolerance goes back, in 4 of 5 cases; and requests of all.

    `others`: replicas that the canary is compared with. Empty without an evaluation that has
    intervals.
    """
    if evaluation is None:
        return []
    tau, domains = evaluation["tau"], _domains(evaluation)
    total = sum(float(one.get("rounds") or 0) for one in domains.values())
    per_conversation = evaluation.get("samples", 1) / max(1, evaluation.get("conversations") or 1)
    overall = {"tau": tau["pooled"], "ci": tau.get("ci")}
    overall["conversations"] = evaluation.get("conversations")
    high = limits.error / 2 / (len(slices) + 2)
    found = []
    known = [(name, domains[name]) for name in slices if name in domains]
    for name, one in [(OVERALL, overall), *known]:
        spread = _spread(one)
        tolerance = limits.max_loss if name == OVERALL else limits.max_slice_loss
        share = 1.0 if name == OVERALL else float(one["rounds"]) / total
        row: Fields = {"slice": name, "share": share, "spread": spread, "tolerance": tolerance}
        for what, effect, level in (
            ("advance", -np.log1p(-tolerance), limits.error),
            ("rollback", -np.log1p(-2 * tolerance), high),
        ):
            if spread is None:
                row[what] = row[f"{what}_requests"] = None
                continue
            count = conversations_needed(spread, others or 1, effect, tolerance, level)
            row[what] = count
            row[f"{what}_requests"] = int(count / share * (1 + others) * per_conversation)
        found.append(row)
    return found


def print_required(found: list[Fields]) -> None:
    """The table that is printed before a canary starts."""
    if not found:
        console.print(
            "how much traffic the decision needs is unknown: there is no evaluation of this "
            "drafter (`flywheel evaluate`)"
        )
        return
    rows = [
        [short_name(r["slice"]), f"{r['tolerance']:.0%}", f"{r['share']:.0%}"]
        + [r["advance"], r["advance_requests"], r["rollback"], r["rollback_requests"]]
        for r in found
    ]
    print_table(
        "Traffic that a decision needs (in 4 of 5 cases, by the evaluation's spread)",
        ["slice", "tolerance", "share", "as good: conversations of the canary", "requests of all"]
        + ["twice the tolerance lost: conversations", "requests of all"],
        rows,
    )


def _domains(evaluation: Fields | None) -> Mapping[str, Fields]:
    slices = ((evaluation or {}).get("tau") or {}).get("slices") or {}
    return slices.get("domain") or {}


def _spread(one: Fields) -> float | None:
    """Standard deviation of one conversation's tau, relative to tau; None if unknown."""
    interval, count = one.get("ci"), one.get("conversations")
    if not interval or not count:
        return None
    reach = NormalDist().inv_cdf(0.975)
    return (interval[1] - interval[0]) / 2 / reach * float(np.sqrt(count)) / one["tau"]
