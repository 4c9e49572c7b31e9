"""How often 95 % intervals contain the true value, near the limits of the scale and between them.

    python -m bench.intervals [datasets=400]

The true tau is known because the data is simulated. A world draws conversations of uneven length,
each with its own chance of acceptance. In some worlds a few conversations are unlike all others.
Gains are paired: both drafters walk the same conversations.
"""

import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bench.harness import report
from jobs.evaluation.intervals import Resamples, Term

K, DRAWS, ROUNDS, REQUESTS = 3, 400, 15, 3
SIZES = (5, 10, 20, 100)
Floats = NDArray[np.float64]
World = Callable[[np.random.Generator, int], list[Floats]]
"""(generator, conversations) -> chances of acceptance of one drafter, or of ours and theirs; each
array has one entry per conversation."""


def some(share: float, chance: float, others: float) -> World:
    """A share of the conversations has one chance, the others have another."""
    return lambda rng, n: [np.where(rng.random(n) < share, chance, others)]


def pair(share: float, ours: tuple[float, float], theirs: tuple[float, float]) -> World:
    """The chances of two drafters, each (in a share of the conversations, in the others)."""

    def world(rng: np.random.Generator, n: int) -> list[Floats]:
        rare = rng.random(n) < share
        return [np.where(rare, *ours), np.where(rare, *theirs)]

    return world


def eased(a: float, b: float, most: float, gains: tuple[float, ...] = (0.0,)) -> World:
    """Chances from a beta distribution, times `most`; drafters differ by a constant gain."""

    def world(rng: np.random.Generator, n: int) -> list[Floats]:
        ease = rng.beta(a, b, n) * most
        return [np.minimum(ease + gain, 1.0) for gain in gains]

    return world


WORLDS: dict[str, World] = {
    "middle": eased(2, 2, 0.7),
    "middle, even": some(0.0, 0.0, 0.5),
    "near B, even 0.99": some(0.0, 0.0, 0.99),
    "near B, even 0.95": some(0.0, 0.0, 0.95),
    "near B, uneven": eased(8, 0.4, 1.0),
    "B but for 3 % at 0.5": some(0.03, 0.5, 1.0),
    "B but for 10 % at 0.5": some(0.10, 0.5, 1.0),
    "near B but for 10 % at 0": some(0.10, 0.0, 0.99),
    "near 1, even 0.01": some(0.0, 0.0, 0.01),
    "near 1, uneven": eased(0.4, 8, 1.0),
    "1 but for 3 % at 0.5": some(0.03, 0.5, 0.0),
    "near 1 but for 10 % at 1": some(0.10, 1.0, 0.01),
    "gain in the middle": eased(2, 2, 0.7, (0.12, 0.0)),
    "gain near B": pair(0.0, (0, 0.98), (0, 0.96)),
    "gain in 10 %, others at B": pair(0.10, (0.8, 1.0), (0.5, 1.0)),
    "loss in 3 %, others at B": pair(0.03, (0.5, 1.0), (0.9, 1.0)),
    "gain near 1": pair(0.0, (0, 0.03), (0, 0.01)),
}


def expected(chance: Floats) -> float:
    """The true tau; a mean over conversations, since their lengths do not depend on the chance."""
    return float(sum(np.mean(chance**k) for k in range(K + 1)))


def walk(rng: np.random.Generator, chance: Floats, rounds: NDArray[np.int64]) -> Floats:
    """Simulated tokens of each conversation."""
    missed = rng.random((len(chance), rounds.max(), K)) > chance[:, None, None]
    accepted = np.where(missed.any(2), missed.argmax(2), K) + 1
    return (accepted * (np.arange(rounds.max()) < rounds[:, None])).sum(1).astype(np.float64)


def measure(world: World, size: int, datasets: int) -> tuple[float, float]:
    """(share of intervals that contain the true value, their mean width)."""
    rng = np.random.default_rng(size)
    taus = [expected(chance) for chance in world(rng, 400_000)]
    truth = taus[0] - sum(taus[1:])
    holds, width = 0, 0.0
    for seed in range(datasets):
        rounds = rng.geometric(1 / ROUNDS, (size, REQUESTS)).sum(1)
        walks = [walk(rng, chance, rounds) for chance in world(rng, size)]
        signs = (1.0, -1.0)[: len(walks)]
        terms: list[Term] = [
            (sign, tokens, rounds.astype(np.float64))
            for sign, tokens in zip(signs, walks, strict=True)
        ]
        draws = Resamples([str(i).zfill(3) for i in range(size)], DRAWS, seed)
        low, high = draws.estimate(*terms, limits=(1.0, K + 1.0)).interval or (np.nan, np.nan)
        holds += low - 1e-9 <= truth <= high + 1e-9
        width += high - low
    return holds / datasets, width / datasets


def main() -> None:
    """Print a row per world: coverage (width) at each number of conversations."""
    datasets = int(sys.argv[1].removeprefix("datasets=")) if len(sys.argv) > 1 else 400
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for name, world in WORLDS.items():
        found[name] = {size: measure(world, size, datasets) for size in SIZES}
        cells = " | ".join(f"{c:.1%} ({w:.2f})" for c, w in found[name].values())
        print(f"| {name} | {cells} |", file=sys.stderr, flush=True)
    lowest = min(coverage for sizes in found.values() for coverage, _ in sizes.values())
    report("intervals", [lowest], "lowest coverage", {"datasets": datasets, "worlds": found})


if __name__ == "__main__":
    main()
