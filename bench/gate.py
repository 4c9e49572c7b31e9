"""How often the gate's rule about domains errs: equal drafters refused, losses let through.

    python -m bench.gate [domains=2000]

Both drafters walk the same simulated conversations, of uneven length and difficulty. In one domain
ours loses a share of tau, or it gains in all. The code that judges is the gate's own. Domains are
independent of one another: each is simulated alone, and verdicts of several follow from the shares.
The rule of earlier releases stands beside it: refuse if a point estimate is more than 0.05 lower.
"""

import sys
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.harness import report
from jobs.evaluation.intervals import Estimate, Resamples, Term
from jobs.evaluation.summaries import judged
from jobs.promotion.gate import loss
from jobs.promotion.gate_rules import read_rules

K, ROUNDS, DRAWS = 7, 40, 1000
CHANCE, SPREAD, OWN = 0.5, 0.15, 0.05
"""Mean chance of acceptance, and standard deviations over conversations: common to both drafters,
and of each alone. With them the old rule refuses equal drafters about as often as it was reported:
in 82 % of cases with 5 domains of 30 conversations."""
OLD = 0.05
PARTS, SIZES = (2, 5, 20), (10, 30, 100, 200)
EFFECTS = {"gain of 5 % in all": 0.05, "equal": 0.0}
EFFECTS |= {f"loss of {n} % in one": -n / 100 for n in (5, 10, 20)}
Floats = NDArray[np.float64]


def chances(rng: np.random.Generator, ease: Floats, shift: float) -> Floats:
    """The chance of acceptance of one drafter in each conversation."""
    return np.clip(ease + OWN * rng.standard_normal(len(ease)) + shift, 0.0, 1.0)


def eases(rng: np.random.Generator, size: int) -> Floats:
    """What makes a conversation easy for any drafter."""
    return CHANCE + SPREAD * rng.standard_normal(size)


def shift_for(effect: float) -> float:
    """What to add to every chance so that tau changes by this share."""
    rng = np.random.default_rng(0)
    ease, shifts = eases(rng, 20_000), np.linspace(-0.2, 0.2, 81)
    taus = []
    for shift in shifts:
        chance = chances(np.random.default_rng(1), ease, shift)
        taus.append(sum(np.mean(chance**k) for k in range(K + 1)))
    return float(np.interp(effect, np.array(taus) / taus[40] - 1, shifts))


def tokens(rng: np.random.Generator, chance: Floats, rounds: NDArray[np.int64]) -> Floats:
    """Simulated tokens of each conversation."""
    missed = rng.random((int(rounds.sum()), K)) > np.repeat(chance, rounds)[:, None]
    made = np.where(missed.any(1), missed.argmax(1), K) + 1
    return np.add.reduceat(made, np.cumsum(rounds) - rounds).astype(np.float64)


def domain(
    rng: np.random.Generator, draws: Resamples, size: int, shift: float
) -> tuple[Estimate, float]:
    """The paired gain in one simulated domain, and the tau before it."""
    rounds, ease = rng.geometric(1 / ROUNDS, size), eases(rng, size)
    below = rounds.astype(np.float64)
    ours, theirs = (tokens(rng, chances(rng, ease, s), rounds) for s in (shift, 0.0))
    terms: list[Term] = [(1.0, ours, below), (-1.0, theirs, below)]
    return draws.estimate(*terms, limits=(1.0, K + 1.0)), float(theirs.sum() / below.sum())


def shares(size: int, effect: float, count: int) -> dict[int, dict[str, float]]:
    """{number of domains judged together: share of each verdict on one of them}."""
    rng, shift = np.random.default_rng([size, round(1000 + 100 * effect)]), shift_for(effect)
    draws = Resamples([f"{i:04}" for i in range(size)], DRAWS)
    found = [domain(rng, draws, size, shift) for _ in range(count)]
    limits, told = read_rules("").domains, {}
    for parts in PARTS:
        named: list[dict[str, Any]] = [
            {"name": "d", **judged(gain, before, parts)} for gain, before in found
        ]
        seen = Counter(loss("domain", limits, one).verdict for one in named)
        seen["old"] = sum(one["delta"] < -OLD for one in named)
        told[parts] = {name: seen[name] / count for name in ("pass", "hold", "refuse", "old")}
    return told


def together(first: dict[str, float], others: dict[str, float], parts: int) -> dict[str, float]:
    """Shares of the verdict of a gate on `parts` domains, the first one unlike the others."""
    rest = parts - 1
    refuse = 1 - (1 - first["refuse"]) * (1 - others["refuse"]) ** rest
    passed = first["pass"] * others["pass"] ** rest
    old = 1 - (1 - first["old"]) * (1 - others["old"]) ** rest
    return {"refuse": refuse, "hold": 1 - refuse - passed, "pass": passed, "old rule": old}


def main() -> None:
    """Print a row per world; the ratio is the largest share of equal drafters that are refused."""
    count = int(sys.argv[1].removeprefix("domains=")) if len(sys.argv) > 1 else 2000
    found: dict[str, dict[str, float]] = {}
    print("| drafter | domains | conversations each | refuse | hold | pass | old rule refuses |")
    print("|---|---|---|---|---|---|---|")
    alone = {(e, s): shares(s, effect, count) for e, effect in EFFECTS.items() for s in SIZES}
    for name, effect in EFFECTS.items():
        for parts in PARTS:
            for size in SIZES:
                others = alone[name if effect > 0 else "equal", size][parts]
                one = together(alone[name, size][parts], others, parts)
                found[f"{name}, {parts} x {size}"] = one
                cells = " | ".join(f"{share:.1%}" for share in one.values())
                print(f"| {name} | {parts} | {size} | {cells} |", flush=True)
    worst = max(one["refuse"] for name, one in found.items() if name.startswith("equal"))
    report("gate", [worst], "largest share of equal drafters refused", found)


if __name__ == "__main__":
    main()
