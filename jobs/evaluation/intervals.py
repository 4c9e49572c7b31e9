"""Confidence intervals of tau and of differences: a studentized bootstrap over conversations.

Requests of one conversation resemble one another, so whole conversations are resampled. Plain
percentiles of the resampled values are too narrow with few conversations: at 20 they cover 88 %
instead of 95 %. Dividing each draw by its own standard error repairs that (docs/decisions/019).
Near a limit of the scale (tau 1 or K + 1) the bootstrap fails: the rare outcomes may not have been
seen at all, and many draws have a standard error of 0. There, and wherever the bootstrap gives no
finite end, the interval allows for one unseen conversation at the limit (docs/decisions/034).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

LEVEL = 0.95
POWER = 0.8
FEWEST = 5
"""Conversations below which no interval is given."""
UNSEEN = 3.0
"""The rule of three: n conversations cannot exclude, at 5 %, that a share of 3 / n of all is unlike
each of them. Where such a share could outweigh the distance between a value and a limit, resampling
the seen conversations says too little.
"""
ROUNDING = 1e-12

Floats = NDArray[np.float64]
Term = tuple[float, Floats, Floats]
"""(sign, numerators, denominators), one entry per conversation: a signed ratio of sums."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value with its standard error and 95 % interval: None with fewer than 5 conversations.

    `effective`: how many conversations of equal length would say as much.
    """

    value: float
    error: float | None
    interval: list[float] | None
    conversations: int
    effective: float = 0.0

    @property
    def detectable(self) -> float | None:
        """The smallest true value for which such an interval excludes 0 in 4 of 5 cases (POWER).
        None without a standard error, and if it is 0: then all conversations have the same value,
        and nothing is known about how others vary.
        """
        if self.error is None or self.error < ROUNDING:  # of equal ratios, rounding may leave 4e-17
            return None
        return _reach() * self.error

    def among(self, tests: int) -> tuple[list[float] | None, float | None]:
        """(interval, detectable) of one of `tests` values that are looked at together. The chance
        that any of the intervals misses its value stays 5 % (Bonferroni): both arms are stretched
        by the ratio of Student's quantiles. 10 equal conversations, 5 tests -> by 1.44.
        `detectable`: the smallest true value for which such an interval excludes 0 in 4 of 5 cases.
        """
        if self.interval is None or self.error is None:
            return None, None
        stretch = _quantile(self.effective, tests) / _quantile(self.effective, 1)
        ends = [self.value + (end - self.value) * stretch for end in self.interval]
        if self.error < ROUNDING:
            return ends, None
        reach = _quantile(self.effective, tests) + NormalDist().inv_cdf(POWER)
        return ends, reach * self.error

    def conversations_for(self, effect: float) -> int | None:
        """How many such conversations make `effect` detectable; None if `detectable` is None."""
        if not self.detectable or effect <= 0:
            return None
        return int(np.ceil(self.conversations * (self.detectable / effect) ** 2))


class Resamples:
    """Conversations drawn with replacement. All that is compared uses the same draws."""

    def __init__(self, conversations: Sequence[str], count: int, seed: int = 0):
        names = sorted(set(conversations))
        where = {name: i for i, name in enumerate(names)}
        self.group = np.array([where[name] for name in conversations], dtype=np.int64)
        self.size = len(names)
        chances, rng = np.full(self.size, 1 / max(1, self.size)), np.random.default_rng(seed)
        self.weights = rng.multinomial(self.size, chances, count).astype(np.float64)
        self.smooth = rng.exponential(size=(count, self.size + 1))  # last column: one unseen

    def tau(self, accepted: Sequence[Sequence[int]], k: int) -> Estimate:
        """Pooled tau of walks of k drafts, one per request, in the order of `conversations`."""
        return self.estimate(self._tau(accepted), limits=(1.0, k + 1.0))

    def tau_gain(
        self, ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], k: int
    ) -> Estimate:
        """Pooled tau of our walks minus that of theirs on the same requests; k: the larger K."""
        sign, tokens, rounds = self._tau(theirs)
        return self.estimate(self._tau(ours), (-sign, tokens, rounds), limits=(1.0, k + 1.0))

    def position(self, accepted: Sequence[Sequence[int]], k: int) -> Estimate:
        """Share of rounds in which draft k (from 1) was accepted."""
        return self.estimate(self._position(accepted, k), limits=(0.0, 1.0))

    def position_gain(
        self, ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], k: int
    ) -> Estimate:
        """The difference of that share, ours minus theirs."""
        sign, hits, rounds = self._position(theirs, k)
        return self.estimate(self._position(ours, k), (-sign, hits, rounds), limits=(0.0, 1.0))

    def estimate(self, *terms: Term, limits: tuple[float, float]) -> Estimate:
        """Estimate a signed sum of ratios of sums over conversations; `limits`: the range of each
        ratio.

        The interval is the intersection of two: that of the studentized draws and that of
        `_unseen`. For a single ratio near a limit it is that of `_unseen` alone.
        """
        inside = np.any([below > 0 for _, _, below in terms], axis=0)
        terms = tuple((sign, above[inside], below[inside]) for sign, above, below in terms)
        used = int(inside.sum())
        found = _statistic(np.ones((1, used)), terms)
        value, error = found[0].item(), found[1].item()
        if used < FEWEST:
            return Estimate(value=value, error=None, interval=None, conversations=used)
        interval = self._unseen(inside, terms, limits)
        if not (len(terms) == 1 and _near(value, limits, used)):
            weights = self.weights if used == self.size else self.weights[:, inside]
            ends = _studentized(value, error, *_statistic(weights, terms))
            interval = [max(interval[0], ends[0]), min(interval[1], ends[1])]
        lengths = terms[0][2]
        effective = float(lengths.sum() ** 2 / (lengths**2).sum())
        return Estimate(
            value=value,
            error=error,
            interval=interval,
            conversations=used,
            effective=effective,
        )

    def _unseen(
        self, inside: NDArray[np.bool_], terms: Sequence[Term], limits: tuple[float, float]
    ) -> list[float]:
        """[low, high] by Gaffke (2005): the conversations and one unseen one of mean length get
        random exponential weights. The unseen one has the worst possible result for the low end,
        the best for the high end. For yes/no shares this is Clopper and Pearson's interval.
        """
        seen, more = self.smooth[:, np.append(inside, False)], self.smooth[:, -1]
        ends = []
        for end, tail in ((0, (1 - LEVEL) / 2), (1, (1 + LEVEL) / 2)):
            drawn = np.zeros(len(seen))
            for sign, above, below in terms:
                extra = more * below.mean()
                limit = limits[end if sign > 0 else 1 - end]
                drawn += sign * (seen @ above + extra * limit) / (seen @ below + extra)
            ends.append(float(np.sort(drawn)[int(tail * len(drawn))]))
        return ends

    def _tau(self, accepted: Sequence[Sequence[int]]) -> Term:
        tokens = self.sums([sum(rounds) + len(rounds) for rounds in accepted])
        return 1.0, tokens, self.sums([len(rounds) for rounds in accepted])

    def _position(self, accepted: Sequence[Sequence[int]], k: int) -> Term:
        hits = self.sums([sum(count >= k for count in rounds) for rounds in accepted])
        return 1.0, hits, self.sums([len(rounds) for rounds in accepted])

    def sums(self, per_request: ArrayLike) -> Floats:
        """Values of requests, summed in their conversations [size]."""
        return np.bincount(self.group, np.asarray(per_request), self.size).astype(np.float64)


def _near(value: float, limits: tuple[float, float], conversations: int) -> bool:
    """Whether unseen conversations (UNSEEN) could outweigh the distance from value to limit."""
    low, high = limits
    return min(value - low, high - value) * conversations < UNSEEN * (high - low)


def _studentized(value: float, error: float, drawn: Floats, errors: Floats) -> tuple[float, float]:
    """(low, high) by percentiles of (drawn - value) / errors. An end is infinite where too many
    draws have a standard error of 0.
    """
    if error < ROUNDING:
        return -np.inf, np.inf
    tail = (1 - LEVEL) / 2
    moved = np.where(np.abs(drawn - value) < ROUNDING, 0.0, drawn - value)
    with np.errstate(divide="ignore", invalid="ignore"):
        z = moved / np.where(errors < ROUNDING, 0.0, errors)
    ordered = np.sort(z[~np.isnan(z)])
    low, high = ordered[int(tail * len(ordered))], ordered[int((1 - tail) * len(ordered))]
    return float(value - high * error), float(value - low * error)


def _statistic(weights: ArrayLike, terms: Sequence[Term]) -> tuple[Floats, Floats]:
    """Value and linearized standard error [draws] under weights [draws, conversations]."""
    weights = np.asarray(weights, np.float64)
    value, residual = np.zeros(len(weights)), np.zeros_like(weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        for sign, above, below in terms:
            total = weights @ below
            ratio = (weights @ above) / total
            value += sign * ratio
            residual += sign * (above - ratio[:, None] * below) / total[:, None]
    size = weights.shape[1]
    return value, np.sqrt(size / max(1, size - 1) * (weights * residual**2).sum(1))


def _quantile(effective: float, tests: int) -> float:
    """Student's quantile of a two-sided interval at level 1 - 0.05 / tests. Where a few are much
    longer than the others, there is little data, hence `effective`.
    """
    return float(stdtrit(max(effective, 2.0) - 1, 1 - (1 - LEVEL) / 2 / tests))


def _reach() -> float:
    """How many standard errors from 0 an effect must be to be detected with POWER: 2.80."""
    normal = NormalDist()
    return normal.inv_cdf(1 - (1 - LEVEL) / 2) + normal.inv_cdf(POWER)
