"""Choose how many tokens to draft at each batch size, from measured round times and replayed tau.

Speed-up(K, b) = tau(K) * step(b) / round(K, b), while b requests decode: step is the time of a
plain decoding step, round that of a round with K drafts. A round computes b * (K + 1) rows of the
target and of the drafter. So its time is modelled as linear in that number; one line is fitted to
all measured K and batch sizes. A single slow pass then shifts all K together and hardly changes
which one is best. Where even the best K is not faster than a plain step, K is 0: no drafts
(docs/decisions/040). Only K between the measured ones are considered. The drafter's pass over its
context costs the same for any K, so extending the line would make a small K look too cheap
(docs/decisions/008).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from serving.client import Completion, Request, complete

CHOICE = "line by rows, 0 below the floor"
"""The rule of this module. It is part of the key of kept results: a new rule measures again."""
BATCHES = (1, 8)
"""Batch sizes at which a round is timed."""
WAVES = 2
"""Batches of requests that are sent for each batch size. With only one, a large K looks too cheap:
answers that finish early leave a smaller batch, which real traffic would fill up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Seconds of one round with k drafts while `batch` requests decode; k = 0: of a plain step."""

    k: int
    batch: int
    seconds: float


def measure_costs(
    urls: Mapping[int, Callable[[], str]],
    requests: Sequence[Request],
    interleaved: bool = True,
    max_tokens: int = 64,
) -> list[Cost]:
    """Time a round of each server at each batch size. `urls`: K -> function that returns the URL of
    its server; K = 0 is the server without drafts.

    Times come from short answers to the same requests. A request's own prefill does not count:
    vLLM reports the time from the first output token to the last. Prefills of other requests in
    that time do count, equally for every K. If not `interleaved`, each server is measured at all
    batch sizes before the next one is used. Raises ValueError if no answer has a second token.
    """
    short = [replace(r, max_tokens=min(r.max_tokens, max_tokens)) for r in requests]
    order = [(k, batch) for batch in BATCHES for k in urls]
    if not interleaved:
        order.sort(key=lambda pair: list(urls).index(pair[0]))
    found, warm = [], set()
    for k, batch in order:
        url = urls[k]()
        if k not in warm:
            complete(url, short[:1], 1)
            warm.add(k)
        answers = complete(url, short[: WAVES * batch], batch)
        rounds = sum(_num_rounds(answer) for answer in answers)
        decoding = sum(answer.decode_seconds or 0.0 for answer in answers)
        if not rounds or not decoding:
            raise ValueError(
                "no round to time: the held-out answers have one token each, or vLLM does not "
                "report generation_time_ms; set serve.k, or hold out longer conversations"
            )
        found.append(Cost(k=k, batch=batch, seconds=decoding / rounds))
    return found


def _num_rounds(answer: Completion) -> int:
    return answer.spec["num_spec_steps"] if answer.spec else len(answer.output_ids) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What to do while `batch` requests decode: draft `k` tokens, whose predicted speed-up is
    `speedup`. `k` is 0 where the best one, `best`, does not reach the floor.
    """

    batch: int
    best: int
    speedup: float
    floor: float

    @property
    def k(self) -> int:
        """Drafts per round; 0: none."""
        return self.best if self.speedup > self.floor else 0


def choices(
    taus: dict[int, float], costs: Sequence[Cost], floors: Sequence[float] = (1.0,)
) -> list[Choice]:
    """The K with the largest predicted speed-up at each batch size from 1 to the largest measured
    one, if that is above the floor: floors[b - 1] at batch size b, the last for all larger.
    """
    found = []
    for batch in range(1, max(BATCHES) + 1):
        ratios = predicted(taus, costs, batch)
        best = max(ratios, key=lambda k: ratios[k])
        floor = floors[min(batch, len(floors)) - 1]
        found.append(Choice(batch=batch, best=best, speedup=ratios[best], floor=floor))
    return found


def choose(taus: dict[int, float], costs: Sequence[Cost]) -> tuple[int, ...]:
    """The K at batch size 1, 2, ...; the last for all larger. taus: replayed tau of every K. Shape
    of the result as in serving.vllm_server.Server.k.
    """
    return by_batch(choices(taus, costs))


def by_batch(found: Sequence[Choice]) -> tuple[int, ...]:
    """K by batch size, without what the last one says for all larger: 7, 4, 4 -> (7, 4)."""
    best = [one.k for one in found]
    while len(best) > 1 and best[-1] == best[-2]:
        best.pop()
    return tuple(best)


def predicted(taus: dict[int, float], costs: Sequence[Cost], batch: int) -> dict[int, float]:
    """Predicted speed-up of every K from the smallest to the largest measured one.

    taus {3: 2.0}, 50 ms for a step and 80 ms for a round at K 3 -> {3: 1.25}.
    """
    measured = [cost.k for cost in costs if cost.k]
    step = _line([cost for cost in costs if not cost.k])(batch)
    time = _line([cost for cost in costs if cost.k])
    return {
        # A round verifies at least what a plain step computes.
        k: float(tau * step / max(step, time(batch * (k + 1))))
        for k, tau in taus.items()
        if min(measured) <= k <= max(measured)
    }


def _line(costs: Sequence[Cost]) -> np.poly1d:
    """The line, seconds by number of rows, with the least squared relative errors."""
    rows = [cost.batch * (cost.k + 1) for cost in costs]
    seconds = [cost.seconds for cost in costs]
    degree = min(1, len(set(rows)) - 1)
    return np.poly1d(np.polyfit(rows, seconds, degree, w=1 / np.array(seconds)))
