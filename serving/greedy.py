"""Greedy text with a drafter against greedy text without it, judged by a control.

Two correct computations of one engine choose differently where two tokens tie, and a drafter
changes how the target computes: it verifies many tokens in one pass. The control does the same
without a drafter: the plain server reads its own answers in one pass each, and where a token is not
its choice then, rounding decided. The drafted answers are read by the same server in the same way.
A drafter is lossless if its tokens lose no more often and by no more than the plain server's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb

from serving.client import Completion, Request, complete

LEVEL = 1e-3
"""Chance of an alarm about the number of lost tokens where the drafter changes nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Answers read again in one pass each: per answer and token, by how much log probability it is
    below the reader's first choice; 0: it is the choice.
    """

    gaps: list[list[float]]

    @property
    def tokens(self) -> int:
        """Tokens that were read."""
        return sum(map(len, self.gaps))

    @property
    def lost(self) -> int:
        """Tokens that are not the reader's choice."""
        return sum(gap > 0 for answer in self.gaps for gap in answer)

    @property
    def largest(self) -> float:
        """The largest gap."""
        return max((gap for answer in self.gaps for gap in answer), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Two greedy answers that part, and by how much the drafted one loses at most.

    position: in the output, of the first token that differs. gap: the largest of the drafted answer
    from there on; None: one answer is the beginning of the other, which no tie explains.
    """

    index: int  # of the request
    position: int
    plain_id: int | None  # None: the answer ends here
    drafted_id: int | None
    gap: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyReport:
    """Drafted against plain; `different` must be empty.

    chance: that so many tokens or more are lost where the drafter changes nothing.
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
    """The answers under a server's log probabilities, each in one pass over prompt and answer.

    The last token is what the server is asked for, so an answer that fills max_model_len is read,
    too.
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
    """What of the drafted answers (and their `reading`) the plain ones (`control`) do not explain.

    Too large: a gap above `bound` (of a near tie in this dtype) and above every gap of the control.
    Too many: more lost tokens, by Fisher's exact test at LEVEL; then all texts that part are
    `different`. Raises ValueError if the prompts are not the same.
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
    """Chance that at least `hits` of all hits fall into the first group: one-sided exact test.

    5 of 5 against 0 of 5: 1 / 252.
    """
    total = comb(of + of_others, hits + other_hits)
    tail = sum(
        comb(of, i) * comb(of_others, hits + other_hits - i)
        for i in range(hits, min(of, hits + other_hits) + 1)
    )
    return tail / total
