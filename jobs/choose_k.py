"""How many tokens to draft at each batch size: measured cost of a round, replayed acceptance.

Speed-up(K, b) = tau(K) / cost(K, b), where cost is the time of one round while b requests decode,
in units of one plain decoding step at the same b. A round of K drafts computes b * (K + 1) rows, so
its cost is taken as linear in K and in b between the four corners that are measured. No K outside
them is considered: the drafter's own pass costs the same for any K, so a line drawn on from two
larger K promises one draft for nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from serving.client import Completion, Request, complete

BATCHES = (1, 8)
"""Batch sizes at which a round is timed."""
WAVES = 2
"""Requests sent per batch size, in batches. In a single one a large K looks cheap: answers it
finishes early leave a smaller batch behind, which traffic would fill."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Time of one round with K drafts while `batch` requests decode, in plain decoding steps."""

    k: int
    batch: int
    cost: float


def measure_costs(
    plain_url: str, drafted_urls: dict[int, str], requests: Sequence[Request], max_tokens: int = 64
) -> list[Cost]:
    """Cost of every K (of the servers in `drafted_urls`) at each batch size, from short answers.

    A request's own prefill does not count (vLLM reports the time from the first output token to the
    last), that of others meanwhile does, the same for every K and for none.
    Raises ValueError if no answer has a second token.
    """
    short = [replace(r, max_tokens=min(r.max_tokens, max_tokens)) for r in requests]
    for url in (plain_url, *drafted_urls.values()):
        complete(url, short[:1], 1)
    found = []
    for batch in BATCHES:
        asked = short[: WAVES * batch]
        plain = complete(plain_url, asked, batch)
        step = _decoding(plain) / max(1, sum(len(answer.output_ids) - 1 for answer in plain))
        for k, url in drafted_urls.items():
            drafted = complete(url, asked, batch)
            rounds = sum(answer.spec["num_spec_steps"] for answer in drafted if answer.spec)
            if not step or not rounds:
                raise ValueError(
                    "the held-out answers have one token each, so there is no round to time: "
                    "set serve.k, or hold out longer conversations"
                )
            found.append(Cost(k=k, batch=batch, cost=_decoding(drafted) / rounds / step))
    return found


def _decoding(answers: Sequence[Completion]) -> float:
    return sum(answer.decode_seconds or 0.0 for answer in answers)


def choose(taus: dict[int, float], costs: Sequence[Cost]) -> tuple[int, ...]:
    """The K with the largest predicted speed-up at batch size 1, 2, ...; the last for all larger.

    taus: replayed tau of every K. Shape of the result as in serving.server.Server.k.
    """
    best = []
    for batch in range(1, max(BATCHES) + 1):
        ratios = predicted(taus, costs, batch)
        best.append(max(ratios, key=lambda k: ratios[k]))
    while len(best) > 1 and best[-1] == best[-2]:
        best.pop()
    return tuple(best)


def predicted(taus: dict[int, float], costs: Sequence[Cost], batch: int) -> dict[int, float]:
    """Predicted speed-up of every K between the measured ones.

    taus {3: 2.0} with a cost of 1.25 at K 3 -> {3: 1.6}.
    """
    low, high = min(c.k for c in costs), max(c.k for c in costs)
    return {k: tau / _cost(k, batch, costs) for k, tau in taus.items() if low <= k <= high}


def _cost(k: int, batch: int, costs: Sequence[Cost]) -> float:
    """Linear in K at each measured batch size, then linear between these."""
    at = {
        size: _line(k, {c.k: c.cost for c in costs if c.batch == size})
        for size in {c.batch for c in costs}
    }
    return max(1.0, _line(batch, at))  # a round verifies at least what a plain step computes


def _line(x: float, points: dict[int, float]) -> float:
    """The value at x of the line through the outer two of `points`; of a single one, itself."""
    low, high = min(points), max(points)
    if low == high:
        return points[low]
    return points[low] + (points[high] - points[low]) * (x - low) / (high - low)
