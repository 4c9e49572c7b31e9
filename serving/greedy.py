"""Greedy text with a drafter against greedy text without it: identical, near tie, or different."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from serving.client import Completion, Request, complete

# Logits of one position move with the shape of the batch they are computed in. In float32 that is
# about 1e-4 here, so a gap below 1e-3 may fall either way; in bfloat16 expect a hundred times that.
TIE_BOUND = 1e-3
TOP = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first position at which two greedy answers part."""

    index: int  # of the request
    position: int  # in the output
    plain_id: int | None  # None: the answer ends here
    drafted_id: int | None
    gap: float | None  # difference of their log probabilities; None: not both in the top 5


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyReport:
    """Counts and the differences themselves; `different` must be empty."""

    requests: int
    identical: int
    near_ties: list[Difference] = field(default_factory=list)
    different: list[Difference] = field(default_factory=list)


def greedy_check(
    plain_url: str,
    plain: Sequence[Completion],
    drafted: Sequence[Completion],
    bound: float = TIE_BOUND,
) -> GreedyReport:
    """Compare the answers of a plain and a drafting server to the same greedy requests.

    Where two answers part, the plain server is asked for the log probabilities at that position
    after the shared prefix: a near tie if the two tokens are closer than `bound` (nats). What
    follows the first difference is another text and is not compared.
    """
    pairs = list(zip(plain, drafted, strict=True))
    found = [
        _difference(plain_url, index, a, b)
        for index, (a, b) in enumerate(pairs)
        if a.output_ids != b.output_ids
    ]
    ties = [one for one in found if one.gap is not None and one.gap < bound]
    return GreedyReport(
        requests=len(pairs),
        identical=len(pairs) - len(found),
        near_ties=ties,
        different=[one for one in found if one not in ties],
    )


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
