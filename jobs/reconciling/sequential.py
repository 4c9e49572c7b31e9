"""Tests that may be looked at after every answer: their errors do not grow with looking.

Two sides are compared by the logarithm of a ratio, such as tokens per round of the canary over
those of the rest. Its standard error s comes from the spread between conversations. The interval
is that of Robbins' normal mixture (a mixture sequential probability ratio test): the true value is
ever above `estimate + s * boundary(scale, s, error)`, at whatever look, in a share `error` of all
comparisons, and likewise below. That holds for large samples (an asymptotic confidence sequence),
so nothing is said before `FEWEST` conversations on each side; bench/rollout.py measures it.

Failures and dead drafters have exact tests (test martingales, Ville's inequality): a value above
1 / error is evidence.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

FEWEST = 20
"""Conversations of each side below which a comparison says nothing."""

Floats = NDArray[np.float64]


def positions(
    accepted: Sequence[int], drafted: Sequence[int], k: int
) -> tuple[list[int], list[int], list[int]]:
    """Rounds of one answer by draft position 1..k: in which it was offered, tried and accepted.

    Position i is offered where at least i tokens were drafted. It is tried where all before it were
    accepted; what share of the tried ones is accepted does not depend on K. The trial of the
    answer's last token is left out, because counts that are cut at the end of text do not tell
    whether a draft of it was right. Which trial that is depends on the text alone.
    """
    offered, tried, passed = [0] * k, [0] * k, [0] * k
    for number, (hits, drafts) in enumerate(zip(accepted, drafted, strict=True), 1):
        last = number == len(accepted)
        for i in range(min(drafts, k)):
            offered[i] += 1
            if i < hits:
                passed[i] += 1
            if i < hits or (i == hits and not last):
                tried[i] += 1
    return offered, tried, passed


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison of acceptance.

    `tried` and `passed`: [conversations, positions]. `offered`: rounds by position, all
    conversations together. `rounds`: all rounds. Without a drafter all of them are 0.
    """

    tried: Floats
    passed: Floats
    offered: Floats
    rounds: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """The logarithm of a ratio with its standard error, and what it was computed from."""

    value: float
    error: float
    conversations: tuple[int, int]  # canary, rest

    def interval(self, scale: float, low: float, high: float) -> tuple[float, float]:
        """Both ends as relative differences (0.05: 5 % more). `low`, `high`: the error of each end.
        (-1, inf) before there are FEWEST conversations on both sides; after that, both are finite.
        """
        if min(self.conversations) < FEWEST:
            return -1.0, float("inf")
        reach = [self.error * boundary(scale, self.error, level) for level in (low, high)]
        largest = 20.0  # evidence is JSON, which has no infinity
        ends = self.value - reach[0], min(self.value + reach[1], largest)
        return float(np.expm1(ends[0])), float(np.expm1(ends[1]))


def boundary(scale: float, error: float, level: float) -> float:
    """How many standard errors one end is from the estimate, for an error `level` of that end."""
    r = (scale / max(error, 1e-12)) ** 2
    return float(np.sqrt((1 + 1 / r) * (2 * np.log(1 / min(2 * level, 1.0)) + np.log1p(r))))


def tokens_per_round(canary: Side, rest: Side) -> Ratio | None:
    """Tokens per round of both sides as if they had been offered the same numbers of drafts: those
    of both together. Without a drafter (no rounds are counted) it is 1. None where the sides have
    no position in common.
    """
    count = len(canary.tried), len(rest.tried)
    if not canary.offered.any() or (rest.rounds and not rest.offered.any()):
        return None  # K was 0 all the time: not the same as having no drafter
    drafting = [side for side in (canary, rest) if side.offered.any()]
    common = np.logical_and.accumulate(np.all([s.tried.sum(0) > 0 for s in drafting], axis=0))
    if not common.any():
        return None
    k = int(common.sum())
    offered = np.sum([s.offered[:k] for s in drafting], axis=0)
    weights = offered / sum(s.rounds for s in drafting)
    ours, theirs = (_log_tau(side, weights, k) for side in (canary, rest))
    return Ratio(ours[0] - theirs[0], float(np.hypot(ours[1], theirs[1])), count)


def _log_tau(side: Side, weights: Floats, k: int) -> tuple[float, float]:
    """log(1 + sum of weights[i] * chance of i + 1 accepted drafts) and its standard error."""
    if not side.offered.any():
        return 0.0, 0.0
    tried, passed = side.tried[:, :k], side.passed[:, :k]
    total = tried.sum(0)
    # Half a hit and half a miss more: a share of 0 or 1 is not certain.
    shares = (passed.sum(0) + 0.5) / (total + 1)
    reached = weights * np.cumprod(shares)
    tau = 1 + reached.sum()
    slopes = np.cumsum(reached[::-1])[::-1] / shares / tau / total
    parts = (passed - shares * tried) @ slopes
    return float(np.log(tau)), _spread(parts)


def ratio_of_sums(canary: tuple[ArrayLike, ArrayLike], rest: tuple[ArrayLike, ArrayLike]) -> Ratio:
    """The ratio of two ratios of sums, each given as (numerators, denominators) by conversation."""
    values, errors, counts = [], [], []
    for above, below in (canary, rest):
        above, below = np.asarray(above, np.float64), np.asarray(below, np.float64)
        counts.append(len(above))
        if not above.sum() > 0 or not below.sum() > 0:
            return Ratio(0.0, float("inf"), (0, 0))
        values.append(np.log(above.sum() / below.sum()))
        errors.append(_spread(above / above.sum() - below / below.sum()))
    return Ratio(float(values[0] - values[1]), float(np.hypot(*errors)), (counts[0], counts[1]))


def together(parts: Sequence[tuple[float, Ratio]]) -> Ratio:
    """The weighted mean of ratios of disjoint slices: (weight, ratio) each."""
    weights = np.array([weight for weight, _ in parts]) / sum(weight for weight, _ in parts)
    value = float(weights @ [ratio.value for _, ratio in parts])
    error = float(np.sqrt(weights**2 @ [ratio.error**2 for _, ratio in parts]))
    counts = np.sum([ratio.conversations for _, ratio in parts], axis=0)
    return Ratio(value, error, (int(counts[0]), int(counts[1])))


def _spread(parts: Floats) -> float:
    """The standard error of a sum of independent parts whose mean is nearly 0."""
    count = len(parts)
    return float(np.sqrt((parts**2).sum() * count / max(1, count - 1)))


def evidence_of_death(shares: Iterable[float], floor: float) -> float:
    """Evidence that the mean of independent values in [0, 1] is below `floor`, exact."""
    values = np.fromiter(shares, np.float64)
    bets = np.array([0.25, 0.5, 1.0])[:, None] / (1 - floor)
    with np.errstate(divide="ignore"):  # a value that excludes the claim leaves evidence 0
        logs = np.log1p(bets * (floor - values)).sum(1)
    return float(np.exp(np.minimum(logs, 500)).mean())


def evidence_of_life(shares: Iterable[float], floor: float) -> float:
    """Evidence that the mean of independent values in [0, 1] is above `floor`, exact."""
    return evidence_of_death([1 - share for share in shares], 1 - floor)


def evidence_of_failures(counts: Iterable[tuple[int, int, int, int]]) -> float:
    """Evidence that the canary fails more often than the rest: exact at any time.

    `counts`: for each interval (requests, failed) of the canary, then of the rest. Given that a
    request failed, it was the canary's with the share of its requests.
    """
    odds = np.array([1.5, 2.0, 4.0, 8.0, 32.0])
    logs = np.zeros(len(odds))
    for asked, failed, others_asked, others_failed in counts:
        if asked + others_asked == 0:
            continue
        share = asked / (asked + others_asked)
        logs += failed * np.log(odds)
        logs -= (failed + others_failed) * np.log1p(share * (odds - 1))
    return float(np.exp(np.minimum(logs, 500)).mean())


def conversations_needed(
    spread: float, others: float, effect: float, scale: float, level: float, power: float = 0.84
) -> int:
    """Conversations of the canary until an interval ends within `effect` of the truth, in 4 of 5
    cases (`power`: that normal quantile).

    `spread`: standard deviation of one conversation's tau, relative to tau. `others`: conversations
    of the rest for each one of the canary. `effect`: distance on the logarithmic scale.
    """
    count = float(FEWEST)
    while count < 1e9:
        error = spread * np.sqrt((1 + 1 / others) / count)
        if error * (boundary(scale, error, level) + power) <= effect:
            break
        count *= 1.02
    return int(np.ceil(count))
