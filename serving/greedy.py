"""Greedy text with a drafter against greedy text without it, judged by a control.

Two correct runs of one engine give different texts where two tokens tie: logits of a position move
with the shape of the batch they are computed in, and in bfloat16 a good part of all answers meets a
tie. So the same requests are answered twice without a drafter, in other batches, and what differs
there says what may differ with one: no more requests, and no larger gaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb

from serving.client import Completion, Request, complete

TOP = 20
"""Most log probabilities that a vLLM server gives by default."""
LEVEL = 1e-3
"""Chance of an alarm about the number of differences where the drafter changes nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first position at which two greedy answers part."""

    index: int  # of the request
    position: int  # in the output
    plain_id: int | None  # None: the answer ends here
    drafted_id: int | None
    gap: float | None  # difference of their log probabilities; None: not both in the top 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """Two answers each to so many requests, and where they part."""

    requests: int
    differences: list[Difference] = field(default_factory=list)

    @property
    def largest(self) -> float:
        """The largest known gap; 0 without a difference."""
        return max((d.gap for d in self.differences if d.gap is not None), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyReport:
    """Drafted against plain, beside plain against plain; `different` must be empty.

    chance: that so many differences or more come about where the drafter changes nothing.
    """

    requests: int
    identical: int
    near_ties: list[Difference]
    different: list[Difference]
    control: Texts
    bound: float  # the largest gap that is no alarm by itself
    chance: float


def compare_texts(
    plain_url: str, plain: Sequence[Completion], other: Sequence[Completion]
) -> Texts:
    """Where the answers to the same greedy requests part first.

    There the plain server is asked for the log probabilities behind the shared prefix. What follows
    is another text and is not compared. Raises ValueError if the prompts are not the same.
    """
    pairs = list(zip(plain, other, strict=True))
    found = [
        _difference(plain_url, index, a, b)
        for index, (a, b) in enumerate(pairs)
        if a.output_ids != b.output_ids
    ]
    return Texts(requests=len(pairs), differences=found)


def judge(control: Texts, drafted: Texts, bound: float) -> GreedyReport:
    """What of the drafted differences the control does not explain.

    Too large: a gap above `bound` (logits, of a near tie in this dtype) and above every gap of the
    control; or an unknown one. Too many: by Fisher's exact test at LEVEL; then the excess over the
    control's share, largest gaps first, is `different`.
    """
    bound = max(bound, control.largest)
    chance = fisher(
        len(drafted.differences), drafted.requests, len(control.differences), control.requests
    )
    ordered = sorted(
        drafted.differences, key=lambda d: float("inf") if d.gap is None else d.gap, reverse=True
    )
    large = sum(d.gap is None or d.gap > bound for d in ordered)
    expected = len(control.differences) * drafted.requests // max(1, control.requests)
    count = max(large, len(ordered) - expected) if chance < LEVEL else large
    return GreedyReport(
        requests=drafted.requests,
        identical=drafted.requests - len(ordered),
        near_ties=ordered[count:],
        different=ordered[:count],
        control=control,
        bound=bound,
        chance=chance,
    )


def fisher(hits: int, of: int, other_hits: int, of_others: int) -> float:
    """Chance that at least `hits` of all hits fall into the first group: one-sided exact test.

    5 of 5 against 0 of 5: 1 / 252.
    """
    total = comb(of + of_others, hits + other_hits)
    return sum(
        comb(of, i) * comb(of_others, hits + other_hits - i)
        for i in range(hits, min(of, hits + other_hits) + 1)
    ) / max(1, total)


def _difference(url: str, index: int, plain: Completion, drafted: Completion) -> Difference:
    if plain.prompt_ids != drafted.prompt_ids:
        raise ValueError(f"request {index}: the two servers were asked with different prompts")
    a, b = plain.output_ids, drafted.output_ids
    shared = min(len(a), len(b))
    position = next((i for i in range(shared) if a[i] != b[i]), shared)
    plain_id = a[position] if position < len(a) else None
    drafted_id = b[position] if position < len(b) else None
    gap = None
    if plain_id is not None and drafted_id is not None:
        gap = _gap(url, plain.prompt_ids + a[:position], plain_id, drafted_id)
    return Difference(
        index=index, position=position, plain_id=plain_id, drafted_id=drafted_id, gap=gap
    )


def _gap(url: str, prefix: list[int], first: int, second: int) -> float | None:
    """Distance of two tokens' log probabilities after `prefix`, if both are among the TOP."""
    ask = Request(
        prompt=prefix,
        max_tokens=1,
        extra={"logprobs": TOP, "return_tokens_as_token_ids": True},
    )
    [answer] = complete(url, [ask], 1)
    top = answer.top_logprobs[0]
    if first not in top or second not in top:
        return None
    return abs(top[first] - top[second])
