"""Did this target write this answer? Its logits against the recorded tokens, over all of them.

Two correct engines round differently, so where two logits nearly tie either token may win. Rounding
errors grow with the numbers that are rounded, so a bound is relative to the largest logit of its
position. Where the constants come from: docs/decisions/030-evidence-of-an-answer.md.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.target_model import ROWS_PER_CHUNK

TIES = {torch.float32: 3e-5, torch.bfloat16: 0.0234, torch.float16: 0.003}
"""Gap of two logits that rounding in this dtype may decide either way, relative to the largest
absolute logit of the position. bfloat16: three units in the last place."""
TYPICAL_LOGIT = 32.0
"""Largest absolute logit where only log-probabilities are known (an engine's answer)."""

MOST_OF_ONE = 8.0
ALLOWED, ALLOWED_PER_TOKEN = 6.0, 0.1
"""A greedy answer is another's if the sum of its gaps in units of the tie bound (those above 1,
each counted up to MOST_OF_ONE) exceeds ALLOWED + ALLOWED_PER_TOKEN x positions."""

FLATTER = (0.0, 0.25, 0.5, 0.75)
LOWEST_TEMPERATURE = 0.5
MOST_SURPRISE = math.log(1e5)
"""A sampled answer is another's if the odds against the target exceed 100,000 to one: those of
the mean of p ** FLATTER (normalised, at each position) against p, the target's distribution at the
temperature, at least LOWEST_TEMPERATURE (below it rounding decides). Under the target they do so in
one of 100,000 answers, whatever their length (Ville); top_k, top_p and min_p only lower them."""


def tie_bound(dtype: torch.dtype, largest_logit: float = TYPICAL_LOGIT) -> float:
    """Gap of two logits (or log-probabilities) that correct engines may decide either way."""
    return TIES[dtype] * largest_logit


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What the positions of an answer say against the target having written it.

    wrong: positions whose logit gap exceeds the tie bound. largest_gap: in logits, of all.
    """

    positions: int
    wrong: int
    largest_gap: float
    score: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the target may have written the answer."""
        return self.score <= self.limit


@torch.inference_mode()
def evidence(last_TH: Tensor, head: Tensor, ids: Tensor, temperature: float) -> Evidence:
    """Judge recorded ids [T]; last [T, H] are the hidden states (after the final norm) before each.

    head [V, H]. temperature 0: every token must be the argmax, near ties aside. Above: the tokens
    must not be too improbable. The logits of one chunk of positions at a time are in memory.
    """
    scores, gaps, units = [], [], []
    for logits, recorded in _chunks(last_TH, head, ids):
        gap = logits.amax(-1) - logits.gather(1, recorded[:, None])[:, 0]
        gaps.append(gap)
        # Of the dtypes that serve, the coarsest: which one wrote the answer is not recorded.
        units.append(gap / (TIES[torch.bfloat16] * logits.abs().amax(-1)))
        if temperature:
            scores.append(_odds(logits / max(temperature, LOWEST_TEMPERATURE), recorded))
    gap, unit = torch.cat(gaps), torch.cat(units)
    if temperature:
        score = torch.cat(scores).sum(0).logsumexp(0) - math.log(len(FLATTER))
    else:
        score = unit.where(~(unit <= 1), torch.zeros_like(unit)).clamp(max=MOST_OF_ONE).sum()
    return Evidence(
        positions=len(gap),
        wrong=int((unit > 1).sum()),
        largest_gap=float(gap.max()),
        score=float(score),
        limit=MOST_SURPRISE if temperature else ALLOWED + ALLOWED_PER_TOKEN * len(gap),
    )


def _chunks(last_TH: Tensor, head: Tensor, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """float32 logits [C, V] with the recorded ids [C], on the head's device."""
    pairs = zip(last_TH.split(ROWS_PER_CHUNK), ids.split(ROWS_PER_CHUNK), strict=True)
    for rows, recorded in pairs:
        logits = rows.to(head.device, head.dtype).contiguous() @ head.T
        yield logits.float(), recorded.to(head.device)


def _odds(logits_CV: Tensor, recorded_C: Tensor) -> Tensor:
    """Log odds [C, len(FLATTER)] of the flatter distributions against p at the recorded ids."""
    logp = logits_CV.log_softmax(-1)
    chosen = logp.gather(1, recorded_C[:, None])[:, 0]
    found = [(power - 1) * chosen - (power * logp).logsumexp(-1) for power in FLATTER]
    return torch.stack(found, dim=-1)
