"""make bench-drift ARGS=40: how often the drift test errs, and how soon it sees a fall.

Simulated requests of one domain, each a conversation of its own: its chance per draft is drawn from
a beta distribution as wide as measured between conversations, its rounds from a Poisson
distribution, K is 7 or 3. The default limits of policy.yaml look at every half `short`. A series
that never changes says how many looks alarm falsely; one that falls says after how many requests it
is seen; one in which only the mix of two domains changes must not alarm. The last line is JSON:
`ratio` = 1 % over the share of false alarms per look, at least that of one alarm.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from jobs.retraining.drift import Request, find_drift, find_mix, request_of
from jobs.retraining.policy import Drift, read_policy

SPREAD = 0.12
"""Standard deviation of the chance per draft between conversations."""
ROUNDS = 20
FALLS = (0.05, 0.10, 0.20)
"""Lost shares of tokens per round."""


def simulate(
    rng: np.random.Generator, count: int, name: str = "a", tau: float = 2.5, start: int = 0
) -> list[Request]:
    """Requests whose tokens per round are about `tau` at K = 7."""
    mean = _chance(tau)
    scale = mean * (1 - mean) / SPREAD**2 - 1
    chances = rng.beta(mean * scale, (1 - mean) * scale, count)
    found = []
    for i, chance in enumerate(chances):
        drafted = rng.choice([7, 3], 1 + rng.poisson(ROUNDS), p=[0.7, 0.3])
        hits = rng.geometric(1 - min(chance, 0.99), len(drafted)) - 1
        accepted = np.minimum(hits, drafted)
        found.append(request_of(name, f"{name}{start + i}", accepted.tolist(), drafted.tolist()))
    return found


def _chance(tau: float) -> float:
    """The chance per draft that gives `tau` at K = 7, if it is the same in all conversations."""
    chances = np.linspace(0.01, 0.99, 981)
    taus = 1 + sum(chances**i for i in range(1, 8))
    return float(np.interp(tau, taus, chances))


def false_alarms(limits: Drift, series: int, looks: int, seed: int = 0) -> tuple[int, int]:
    """(alarms, looks) in traffic that never changes. A look that goes on firing counts again."""
    rng, step = np.random.default_rng(seed), limits.short // 2
    alarms = 0
    for _ in range(series):
        requests = simulate(rng, limits.long + limits.short + looks * step)
        for look in range(looks):
            now = requests[: limits.long + limits.short + look * step]
            alarms += find_drift(now, limits)[0].fires
    return alarms, series * looks


def delay(limits: Drift, fall: float, series: int, seed: int = 0) -> tuple[float, int | None]:
    """(share of series in which a fall is seen within 2 * short requests, the median number of
    requests until it is; None if most do not see it).
    """
    rng, step, seen = np.random.default_rng(seed), limits.short // 4, []
    for _ in range(series):
        before = simulate(rng, limits.long + limits.short)
        after = simulate(rng, 2 * limits.short, tau=2.5 * (1 - fall), start=len(before))
        counts = range(step, len(after) + 1, step)
        fires = (n for n in counts if find_drift(before + after[:n], limits)[0].fires)
        seen.append(next(fires, None))
    found = sorted(n for n in seen if n is not None)
    median = found[series // 2] if len(found) > series // 2 else None
    return len(found) / series, median


def mix_alarms(limits: Drift, series: int, seed: int = 0) -> tuple[int, float, float]:
    """(alarms, mean change by the mix, mean change within) where traffic goes from nine tenths of a
    domain with tau 3 to nine tenths of one with tau 1.5, and neither domain changes.
    """
    rng = np.random.default_rng(seed)
    alarms, mixes, withins = 0, [], []
    for _ in range(series):
        requests: list[Request] = []
        for count, share in ((2 * limits.long, 0.9), (2 * limits.short, 0.1)):
            good = simulate(rng, int(count * share), "good", 3.0, len(requests))
            poor = simulate(rng, count - len(good), "poor", 1.5, len(requests))
            part = [*good, *poor]
            requests += [part[i] for i in rng.permutation(len(part))]
        alarms += sum(one.fires for one in find_drift(requests, limits))
        mixed = find_mix(requests, limits)
        assert mixed is not None
        mixes.append(mixed.mix)
        withins.append(mixed.within)
    return alarms, float(np.mean(mixes)), float(np.mean(withins))


def measure(series: int) -> dict[str, Any]:
    """All of it, `series` times each."""
    limits = replace(read_policy("").drift, long=2000)
    alarms, looks = false_alarms(limits, series, looks=8)
    falls = {f"{fall:.0%}": delay(limits, fall, max(20, series // 4)) for fall in FALLS}
    mixed = mix_alarms(limits, max(20, series // 4))
    return {
        "false_alarms": [alarms, looks],
        "seen_and_median_requests": falls,
        "mix": {"alarms": mixed[0], "mix": mixed[1], "within": mixed[2]},
        "ratio": 0.01 / (max(1, alarms) / looks),
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 100)))
