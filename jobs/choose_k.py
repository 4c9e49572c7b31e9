"""How many tokens to draft: measured cost of a round against replayed acceptance.

Speed-up(K, c) = tau(K) / cost(K, c), where cost is the time of one round at concurrency c in units
of one plain decoding step. Cost is measured on the server at two K and taken as linear between.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from serving.client import Completion, Request, complete

CONCURRENCY = (1, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Time of one round with K drafts at a concurrency, in plain decoding steps."""

    k: int
    concurrency: int
    cost: float


def measure_cost(
    plain_url: str, drafted_url: str, requests: Sequence[Request], k: int, max_tokens: int = 24
) -> list[Cost]:
    """Cost at each concurrency, from short answers to the same requests on both servers."""
    short = [replace(r, max_tokens=min(r.max_tokens, max_tokens)) for r in requests]
    for url in (plain_url, drafted_url):
        complete(url, short[:1], 1)
    found = []
    for concurrency in CONCURRENCY:
        asked = short[:3] if concurrency == 1 else short[:concurrency]
        plain, plain_seconds = _timed(plain_url, asked, concurrency)
        drafted, drafted_seconds = _timed(drafted_url, asked, concurrency)
        steps = sum(len(answer.output_ids) for answer in plain)
        rounds = sum(answer.spec["num_spec_steps"] + 1 for answer in drafted if answer.spec)
        cost = (drafted_seconds / rounds) / (plain_seconds / steps)
        found.append(Cost(k=k, concurrency=concurrency, cost=cost))
    return found


def choose(taus: dict[int, float], costs: Sequence[Cost]) -> int:
    """The K with the largest geometric mean of predicted speed-ups over the concurrencies."""
    return max(taus, key=lambda k: math.prod(predicted(taus, costs, k).values()))


def predicted(taus: dict[int, float], costs: Sequence[Cost], k: int) -> dict[int, float]:
    """Predicted speed-up by concurrency. taus {3: 2.0}, cost 1.25 at K 3 -> 1.6."""
    return {
        concurrency: taus[k] / _cost_at(k, [c for c in costs if c.concurrency == concurrency])
        for concurrency in sorted({c.concurrency for c in costs})
    }


def _cost_at(k: int, costs: Sequence[Cost]) -> float:
    low, high = min(costs, key=lambda c: c.k), max(costs, key=lambda c: c.k)
    if low.k == high.k:
        return low.cost
    cost = low.cost + (high.cost - low.cost) * (k - low.k) / (high.k - low.k)
    return max(1.0, cost)  # a round verifies at least what a plain step computes


def _timed(
    url: str, requests: Sequence[Request], concurrency: int
) -> tuple[list[Completion], float]:
    started = time.perf_counter()
    answers = complete(url, requests, concurrency)
    return answers, time.perf_counter() - started
