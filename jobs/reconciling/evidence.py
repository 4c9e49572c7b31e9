"""What served answers say about the canary and the rest, summed up as the tests need it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jobs.reconciling.sequential import Floats, Side, positions

MOST_K = 32
"""Draft positions that are compared; drafts beyond are not looked at."""
MOST = 1e12
"""Times and counts of an answer are below."""
CANARY, REST = "canary", "rest"
OTHERS = "(all others)"
"""The slice of every domain that is not judged on its own."""

Counts = tuple[list[int], list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request as far as it is compared. `counts`: offered, tried, accepted by
    position. `first_token`: seconds until it, None if unknown.
    """

    slice: str
    conversation: str
    rounds: int
    counts: Counts
    seconds: float
    tokens: int
    first_token: float | None

    @property
    def first_share(self) -> float | None:
        """Share of the first drafts that were accepted; None where nothing was drafted."""
        offered, _, passed = self.counts
        return passed[0] / offered[0] if offered[0] else None


def answer_of(row: dict[str, Any], slices: Sequence[str], k: int = MOST_K) -> Answer:
    """The answer of a row of a replica's feed. `slices`: the domains judged on their own.

    Raises ValueError for a row that is none, such as one with a time that is no number: one of them
    would spoil every sum.
    """
    domain = str(row.get("domain") or "")
    accepted, drafted = row.get("accepted") or [], row.get("drafted") or []
    if not isinstance(accepted, list) or not isinstance(drafted, list):
        raise ValueError("its counts are no lists")
    if len(accepted) != len(drafted) or any(type(n) is not int for n in accepted + drafted):
        raise ValueError("its counts are not one per round")
    times = [row.get(name) or 0 for name in ("seconds", "output_tokens", "first_token_seconds")]
    if not all(_is_number(n) for n in [*accepted, *drafted, *times, row.get("finished_at")]):
        raise ValueError("its counts or times are no numbers")
    if not row.get("drafter_sha256"):
        accepted, drafted = [], []  # without a drafter there are no rounds
    counts = positions(accepted, drafted, k) if any(drafted) else ([0] * k, [0] * k, [0] * k)
    return Answer(
        slice=domain if domain in slices else OTHERS,
        conversation=str(row.get("conversation_id") or row.get("request_id") or row.get("seq")),
        rounds=len(accepted),
        counts=counts,
        seconds=float(row.get("seconds") or 0.0),
        tokens=int(row.get("output_tokens") or 0),
        first_token=row.get("first_token_seconds"),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < MOST


@dataclass
class Sums:
    """Sums by conversation of one side and slice. Columns: tried and accepted by position, tokens,
    seconds, seconds until first tokens, answers with a first token.
    """

    k: int
    rows: dict[str, int] = field(default_factory=dict)
    answers: int = 0
    rounds: int = 0

    def __post_init__(self) -> None:
        self.buffer = np.zeros((16, 2 * self.k + 4))
        self.offered = np.zeros(self.k)

    def add(self, answer: Answer) -> None:
        """Count one more answer."""
        row = self.rows.setdefault(answer.conversation, len(self.rows))
        if row == len(self.buffer):
            self.buffer = np.concatenate([self.buffer, np.zeros_like(self.buffer)])
        offered, tried, passed = answer.counts
        known = answer.first_token is not None
        more = [answer.tokens, answer.seconds, answer.first_token or 0.0, float(known)]
        self.buffer[row] += [*tried, *passed, *more]
        self.offered += offered
        self.rounds += answer.rounds
        self.answers += 1

    @property
    def values(self) -> Floats:
        """The filled part of the buffer [conversations, columns]."""
        return self.buffer[: len(self.rows)]


class Arms:
    """Both sides, slice by slice."""

    def __init__(self, slices: Sequence[str], k: int = MOST_K):
        self.slices, self.k = [*slices, OTHERS], k
        self.sums = {(a, s): Sums(k) for a in (CANARY, REST) for s in self.slices}
        self.first_shares: dict[str, float] = {}
        self.failures: list[tuple[int, int, int, int]] = []

    def add(self, side: str, answer: Answer) -> None:
        """Count an answer. The canary's first answer of each conversation also counts for the test
        of dead drafters, which needs independent values.
        """
        self.sums[side, answer.slice].add(answer)
        share = answer.first_share
        if side == CANARY and share is not None:
            self.first_shares.setdefault(answer.conversation, share)

    def answers(self, side: str) -> int:
        """Answers of one side."""
        return sum(self.sums[side, name].answers for name in self.slices)

    def side(self, side: str, slices: Sequence[str]) -> Side:
        """Acceptance of one side in some slices together."""
        found = [self.sums[side, name] for name in slices]
        values = np.concatenate([one.values for one in found])
        drafted = sum((one.offered for one in found), np.zeros(self.k))
        tried, passed = values[:, : self.k], values[:, self.k : 2 * self.k]
        return Side(tried, passed, drafted, sum(one.rounds for one in found))

    def pace(self, side: str) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """(tokens, seconds) and (seconds until first tokens, answers) by conversation."""
        values = np.concatenate([self.sums[side, name].values for name in self.slices])
        tokens, seconds, first, known = values[:, 2 * self.k :].T
        return (tokens, seconds), (first[known > 0], known[known > 0])
