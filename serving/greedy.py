"""Greedy text with a drafter against greedy text without it, judged by a control.

Two correct computations of one engine may choose differently where two tokens nearly tie. A drafter
changes how the target computes: it verifies many tokens in one pass. The control does the same
without a drafter: the plain server reads each of its own answers in one pass. A token that is not
its first choice then is "lost": rounding decided. The same server reads the drafted answers in the
same way. A drafter is lossless if its tokens are lost no more often than the plain server's own,
and by no larger gaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb

from serving.client import Completion, Request, complete

LEVEL = 1e-3
"""Probability of a false alarm about the number of lost tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Answers read again in one pass each.

    gaps: for each answer and token, by how much its log-probability is below that of the reader's
    first choice; 0 if it is the first choice.
    """

    gaps: list[list[float]]

    @property
    def tokens(self) -> int:
        """Number of tokens that were read."""
        return sum(map(len, self.gaps))

    @property
    def lost(self) -> int:
        """Number of tokens that are not the reader's first choice."""
        return sum(gap > 0 for answer in self.gaps for gap in answer)

    @property
    def largest(self) -> float:
        """The largest gap."""
        return max((gap for answer in self.gaps for gap in answer), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Two greedy answers that differ.

    position: index in the output of the first token that differs. gap: the largest gap of the
    drafted answer from there on; None if one answer is the beginning of the other, which no tie
    explains.
    """

    index: int  # of the request
    position: int
    plain_id: int | None  # None: the answer ends here
    drafted_id: int | None
    gap: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyReport:
    """Drafted against plain; `different` must be empty.

    chance: probability that so many tokens or more are lost although the drafter changes nothing.
    """

    requests: int
    identical: int
    near_ties: list[Difference]
    different: list[Difference]
    control: Reading
    drafted: Reading
    bound: float  # the largest gap that is no alarm by itself
    chance: float


def read_again(url: str, answers: Sequence[Completion], concurrency: int, label: str) -> Reading:
    """Let a server read the answers again, each in one pass over prompt and answer.

    The last token is not sent: the server generates one token there, whose log-probabilities are
    used. So an answer that fills max_model_len can be read, too.
    """
    asked = [
        Request(
            prompt=[*answer.prompt_ids, *answer.output_ids[:-1]],
            max_tokens=1,
            extra={"prompt_logprobs": 1, "logprobs": 20, "return_tokens_as_token_ids": True},
        )
        for answer in answers
    ]
    found = complete(url, asked, concurrency, label)
    return Reading(gaps=[_gaps(a, again) for a, again in zip(answers, found, strict=True)])


def _gaps(answer: Completion, again: Completion) -> list[float]:
    told = [*again.prompt_logprobs[len(answer.prompt_ids) :], *again.top_logprobs[:1]]
    return [
        max(top.values()) - top.get(token, min(top.values()))
        for token, top in zip(answer.output_ids, told, strict=True)
    ]


def judge(
    plain: Sequence[Completion],
    drafted: Sequence[Completion],
    control: Reading,
    reading: Reading,
    bound: float,
) -> GreedyReport:
    """Find what of the drafted answers (and their `reading`) the `control` does not explain.

    A gap is too large if it is above `bound` (a near tie in this dtype) and above every gap of the
    control. Lost tokens are too many if Fisher's exact test finds more than in the control, at
    LEVEL; then all texts that differ are `different`. Raises ValueError if the prompts are not the
    same.
    """
    bound = max(bound, control.largest)
    chance = fisher(reading.lost, reading.tokens, control.lost, control.tokens)
    parted = [
        _difference(index, a, b, gaps)
        for index, (a, b, gaps) in enumerate(zip(plain, drafted, reading.gaps, strict=True))
        if a.output_ids != b.output_ids
    ]
    wrong = [d for d in parted if chance < LEVEL or d.gap is None or d.gap > bound]
    return GreedyReport(
        requests=len(plain),
        identical=len(plain) - len(parted),
        near_ties=[d for d in parted if d not in wrong],
        different=sorted(wrong, key=lambda d: -1e9 if d.gap is None else -d.gap),
        control=control,
        drafted=reading,
        bound=bound,
        chance=chance,
    )


def _difference(
    index: int, plain: Completion, drafted: Completion, gaps: Sequence[float]
) -> Difference:
    if plain.prompt_ids != drafted.prompt_ids:
        raise ValueError(f"request {index}: the two servers were asked with different prompts")
    a, b = plain.output_ids, drafted.output_ids
    shared = min(len(a), len(b))
    position = next((i for i in range(shared) if a[i] != b[i]), shared)
    found = Difference(
        index=index,
        position=position,
        plain_id=a[position] if position < len(a) else None,
        drafted_id=b[position] if position < len(b) else None,
        gap=None,
    )
    return found if position == shared else replace(found, gap=max(gaps[position:]))


def fisher(hits: int, of: int, other_hits: int, of_others: int) -> float:
    """Probability that at least `hits` of all hits fall into the first group: one-sided exact test.

    Example: 5 of 5 against 0 of 5 gives 1 / 252.
    """
    total = comb(of + of_others, hits + other_hits)
    tail = sum(
        comb(of, i) * comb(of_others, hits + other_hits - i)
        for i in range(hits, min(of, hits + other_hits) + 1)
    )
    return tail / total
