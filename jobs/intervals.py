"""How sure a tau or a difference is: a studentized bootstrap over conversations.

Requests of one conversation resemble one another, so conversations are what is drawn. Percentiles
of the drawn values are too narrow with few conversations (88 % instead of 95 % at 20); dividing
each draw by its own standard error repairs that (docs/decisions/019).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
POWER = 0.8
FEWEST = 5
"""Conversations below which no interval is given."""

Floats = NDArray[np.float64]
Term = tuple[float, Floats, Floats]
"""(sign, numerators, denominators), one entry per conversation: a signed ratio of sums."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value with its standard error and 95 % interval.

    Both are None with fewer than 5 conversations, the interval also if the event is too rare.
    """

    value: float
    error: float | None
    interval: list[float] | None
    conversations: int

    @property
    def detectable(self) -> float | None:
        """The smallest true value that such an interval excludes 0 for, 4 times out of 5."""
        return None if self.error is None else _reach() * self.error

    def conversations_for(self, effect: float) -> int | None:
        """Conversations of this kind that make `effect` detectable; None if nothing is known."""
        if not self.detectable or effect <= 0:
            return None
        return int(np.ceil(self.conversations * (self.detectable / effect) ** 2))


class Resamples:
    """Conversations drawn with replacement, the same draws for everything that is compared."""

    def __init__(self, conversations: Sequence[str], count: int, seed: int = 0):
        names = sorted(set(conversations))
        where = {name: i for i, name in enumerate(names)}
        self.group = np.array([where[name] for name in conversations], dtype=np.int64)
        self.size = len(names)
        chances = np.full(self.size, 1 / max(1, self.size))
        self.weights = np.random.default_rng(seed).multinomial(self.size, chances, count)

    def tau(self, accepted: Sequence[Sequence[int]]) -> Estimate:
        """Pooled tau of walks, one per request, in the order of `conversations`."""
        return self.estimate(self._tau(accepted))

    def tau_gain(self, ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Estimate:
        """Pooled tau of our walks minus that of theirs on the same requests."""
        sign, tokens, rounds = self._tau(theirs)
        return self.estimate(self._tau(ours), (-sign, tokens, rounds))

    def position(self, accepted: Sequence[Sequence[int]], k: int) -> Estimate:
        """Share of rounds in which draft k (from 1) was accepted."""
        return self.estimate(self._position(accepted, k))

    def position_gain(
        self, ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], k: int
    ) -> Estimate:
        """The difference of that share, ours minus theirs."""
        sign, hits, rounds = self._position(theirs, k)
        return self.estimate(self._position(ours, k), (-sign, hits, rounds))

    def estimate(self, *terms: Term) -> Estimate:
        """A signed sum of ratios of sums over conversations."""
        inside = np.any([below > 0 for _, _, below in terms], axis=0)
        terms = tuple((sign, above[inside], below[inside]) for sign, above, below in terms)
        used = int(inside.sum())
        value, error = _statistic(np.ones((1, used)), terms)
        if used < FEWEST:
            return Estimate(value=value.item(), error=None, interval=None, conversations=used)
        drawn, errors = _statistic(self.weights[:, inside], terms)
        with np.errstate(divide="ignore", invalid="ignore"):
            z = (drawn - value) / errors
        return Estimate(
            value=value.item(),
            error=error.item(),
            interval=_interval(z, value.item(), error.item()),
            conversations=used,
        )

    def _tau(self, accepted: Sequence[Sequence[int]]) -> Term:
        tokens = self.sums([sum(rounds) + len(rounds) for rounds in accepted])
        return 1.0, tokens, self.sums([len(rounds) for rounds in accepted])

    def _position(self, accepted: Sequence[Sequence[int]], k: int) -> Term:
        hits = self.sums([sum(count >= k for count in rounds) for rounds in accepted])
        return 1.0, hits, self.sums([len(rounds) for rounds in accepted])

    def sums(self, per_request: ArrayLike) -> Floats:
        """Values of requests, summed in their conversations [size]."""
        return np.bincount(self.group, np.asarray(per_request), self.size).astype(np.float64)


def _interval(z: Floats, value: float, error: float) -> list[float] | None:
    """None if an end is out of sight: too many draws have no event, hence no error of their own."""
    if error == 0:
        return [value, value]
    tail = (1 - LEVEL) / 2
    ordered = np.sort(z[~np.isnan(z)])
    low, high = ordered[int(tail * len(ordered))], ordered[int((1 - tail) * len(ordered))]
    found = [float(value - high * error), float(value - low * error)]
    return found if np.isfinite(found).all() else None


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


def _reach() -> float:
    """Standard errors between 0 and an effect that is found with POWER: 2.80."""
    normal = NormalDist()
    return normal.inv_cdf(1 - (1 - LEVEL) / 2) + normal.inv_cdf(POWER)
