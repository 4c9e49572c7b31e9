"""Advance, hold or roll back: what the evidence of a canary allows.

A drafter goes back when a loss is established, overall or in a slice, and not shown to be within
its tolerance; when it fails more requests, is slower than tolerated, or drafts nothing that is
accepted. It advances when losses beyond the tolerance are excluded, overall and in every slice that
is judged on its own, and when it is shown that some drafts are accepted at all. Everything else is
a hold: too little data is never a pass.

`rollout.error` bounds wrong roll-backs: half of it goes to acceptance, in equal parts to all slices
and their sum, the other half to the four guards. A wrong advance needs every interval to be wrong
at once, so each lower end has the whole error.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from jobs.base.console import short_name
from jobs.base.sections.rolling_out import Rollout
from jobs.reconciling.evidence import CANARY, OTHERS, REST, Arms
from jobs.reconciling.sequential import (
    FEWEST,
    Ratio,
    evidence_of_death,
    evidence_of_failures,
    evidence_of_life,
    ratio_of_sums,
    together,
    tokens_per_round,
)

OVERALL = "(overall)"
FEWEST_POOLED = 5
"""Conversations of each side from which on slices that are short of data count in the sum."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One comparison: relative difference of the canary to the rest, with its interval, or None."""

    name: str
    conversations: tuple[int, int]  # canary, rest
    offered: tuple[int, int]
    accepted: tuple[int, int]
    difference: float | None
    low: float | None
    high: float | None
    tolerance: float
    answer: str  # advance | hold | rollback


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer, why, and every comparison behind it. `answers`: of the canary and the rest."""

    answer: str
    reasons: list[str]
    judged: list[Judged]
    guards: dict[str, Any]
    answers: tuple[int, int] = field(default=(0, 0))

    def summary(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def judge(arms: Arms, limits: Rollout) -> Verdict:
    """The verdict on what has been seen so far."""
    slices = _slices(arms, limits)
    guards, bad = _guards(arms, limits)
    back = [j for j in slices if j.answer == "rollback"]
    reasons = bad + [
        f"{_named(j)} loses {-(j.difference or 0):.1%} of its tokens per round (between "
        f"{-(j.high or 0):.1%} and {-(j.low or 0):.1%}; {j.tolerance:.0%} are tolerated)"
        for j in back
    ]
    short = [j for j in slices if j.answer == "hold" and j.name != OTHERS]
    if reasons:
        answer = "rollback"
    elif short or not guards["first_drafts"]["alive"]:
        answer, reasons = "hold", [_short(j) for j in short]
        if not reasons:
            reasons = [f"{limits.min_first:.0%} of first drafts (rollout.min_first) is not proven"]
    else:
        answer = "advance"
        reasons = ["a loss beyond the tolerance is excluded, overall and in every judged domain"]
    return Verdict(answer, reasons, slices, guards, (arms.answers(CANARY), arms.answers(REST)))


def _slices(arms: Arms, limits: Rollout) -> list[Judged]:
    high = limits.error / 2 / (len(arms.slices) + 1)
    found, parts, pooled = [], [], []
    for name in arms.slices:
        ratio = tokens_per_round(arms.side(CANARY, [name]), arms.side(REST, [name]))
        found.append(_judged(name, [name], arms, ratio, limits.max_slice_loss, limits.error, high))
        if ratio is None or min(ratio.conversations) < FEWEST:
            pooled.append(name)
        else:
            parts.append((_rounds(arms, [name]), ratio))
    if pooled:
        ratio = tokens_per_round(arms.side(CANARY, pooled), arms.side(REST, pooled))
        if ratio is not None and min(ratio.conversations) >= FEWEST_POOLED:
            parts.append((_rounds(arms, pooled), ratio))
    ratio = together(parts) if parts else None
    overall = _judged(OVERALL, arms.slices, arms, ratio, limits.max_loss, limits.error, high)
    return [overall, *found]


def _judged(
    name: str,
    slices: list[str],
    arms: Arms,
    ratio: Ratio | None,
    tolerance: float,
    low_error: float,
    high_error: float,
) -> Judged:
    sides = [arms.side(side, slices) for side in (CANARY, REST)]
    counts = (len(sides[0].tried), len(sides[1].tried))
    offered, accepted = (
        [int(s.offered.sum()) for s in sides],
        [int(s.passed.sum()) for s in sides],
    )
    if ratio is None or min(ratio.conversations) < FEWEST:
        ends, answer, difference = (None, None), "hold", None
    else:
        ends = ratio.interval(tolerance, low_error, high_error)
        difference = float(np.expm1(ratio.value))
        answer = "hold"
        if ends[0] > -tolerance:
            answer = "advance"
        elif ends[1] < 0:
            answer = "rollback"
    return Judged(
        name,
        counts,
        (offered[0], offered[1]),
        (accepted[0], accepted[1]),
        difference,
        *ends,
        tolerance,
        answer,
    )


def _guards(arms: Arms, limits: Rollout) -> tuple[dict[str, Any], list[str]]:
    """The guards with their numbers, and why the canary goes back."""
    error = limits.error / 8
    dead = evidence_of_death(arms.first_shares.values(), limits.min_first)
    alive = evidence_of_life(arms.first_shares.values(), limits.min_first) > 1 / limits.error
    failing = evidence_of_failures(arms.failures)
    (ours, our_first), (theirs, their_first) = arms.pace(CANARY), arms.pace(REST)
    speed, delay = ratio_of_sums(ours, theirs), ratio_of_sums(our_first, their_first)
    slow = speed.interval(limits.max_slowdown, error, error)
    late = delay.interval(limits.max_delay, error, error)
    asked, failed, others_asked, others_failed = (
        sum(column) for column in zip(*(arms.failures or [(0, 0, 0, 0)]), strict=True)
    )
    reasons = []
    if dead > 1 / error:
        shares = list(arms.first_shares.values())
        reasons.append(
            f"{sum(shares) / len(shares):.1%} of the first drafts are accepted, below "
            f"rollout.min_first {limits.min_first:.0%}"
        )
    if failing > 1 / error:
        reasons.append(
            f"the canary failed {failed} of {asked} requests, the rest {others_failed} of "
            f"{others_asked}"
        )
    if slow[1] < -limits.max_slowdown:
        reasons.append(f"answers have {-slow[1]:.0%} fewer tokens per second, or worse")
    if late[0] > limits.max_delay:
        reasons.append(f"the first token comes {late[0]:.0%} later, or worse")
    guards = {
        "first_drafts": {
            "conversations": len(arms.first_shares),
            "evidence": _finite(dead),
            "alive": alive,
        },
        "failed": {
            "canary": [failed, asked],
            "rest": [others_failed, others_asked],
            "evidence": _finite(failing),
        },
        "tokens_per_second": _interval(speed, slow),
        "first_token_seconds": _interval(delay, late),
    }
    return guards, reasons


def _interval(ratio: Ratio, ends: tuple[float, float]) -> dict[str, float] | None:
    if min(ratio.conversations) < FEWEST:
        return None
    return {"ratio": float(np.exp(ratio.value)), "low": 1 + ends[0], "high": 1 + ends[1]}


def _finite(evidence: float) -> float:
    """Evidence as JSON has it: no infinity."""
    return min(evidence, 1e9)


def _rounds(arms: Arms, slices: list[str]) -> float:
    return float(sum(arms.side(side, slices).rounds for side in (CANARY, REST)))


def _short(judged: Judged) -> str:
    if judged.low is None:
        ours, theirs = judged.conversations
        return (
            f"{_named(judged)}: {ours} conversations of the canary and {theirs} of the rest, at "
            f"least {FEWEST} of each are needed"
        )
    return (
        f"{_named(judged)}: a loss of {-judged.low:.1%} is not excluded yet, "
        f"{judged.tolerance:.0%} are tolerated"
    )


def _named(judged: Judged) -> str:
    if judged.name == OVERALL:
        return "all traffic"
    return "the other domains" if judged.name == OTHERS else f"domain {short_name(judged.name)}"
