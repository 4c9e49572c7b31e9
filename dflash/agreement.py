"""Did this target write this answer? Its logits are compared with all recorded tokens together.

Two correct engines round differently, so where two logits nearly tie, either token may win.
Rounding errors grow with the numbers that are rounded, so a bound is relative to the largest logit
of its position. Where the constants come from: docs/decisions/030-evidence-of-an-answer.md.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.target_model import ROWS_PER_CHUNK

TIES = {torch.float32: 3e-5, torch.bfloat16: 0.0234, torch.float16: 0.003}
"""The tie bound: up to this gap, rounding in this dtype may decide which of two logits is larger.
It is relative to the largest absolute logit of the position. bfloat16: three units in the last
place."""
TYPICAL_LOGIT = 32.0
"""Largest absolute logit to assume where only log-probabilities are known (an engine's answer)."""

MOST_OF_ONE = 8.0
ALLOWED, ALLOWED_PER_TOKEN = 6.0, 0.1
"""A greedy answer is taken for another model's if its score exceeds ALLOWED + ALLOWED_PER_TOKEN x
positions. The score sums the logit gaps in units of the tie bound. A gap up to 1 unit counts 0, a
larger one counts at most MOST_OF_ONE."""

FLATTER = (0.0, 0.25, 0.5, 0.75)
LOWEST_TEMPERATURE = 0.5
MOST_SURPRISE = math.log(1e5)
"""A sampled answer is taken for another model's if the odds against the target exceed 100,000 to 1;
this is their logarithm. Let p be the target's distribution at the answer's temperature, but at no
less than LOWEST_TEMPERATURE, below which rounding decides. The odds divide a mean probability of
the answer by its probability under p. The mean is over flatter distributions: p ** f, normalised at
each position, for every f in FLATTER. For an answer of the target, the odds exceed the limit with a
probability of at most 1 in 100,000, whatever its length (Ville's inequality). top_k, top_p and
min_p only lower the odds."""


def tie_bound(dtype: torch.dtype, largest_logit: float = TYPICAL_LOGIT) -> float:
    """Gap of two logits (or log-probabilities) up to which correct engines may choose either."""
    return TIES[dtype] * largest_logit


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Evidence in the positions of an answer that the target did not write it.

    wrong: number of positions whose logit gap exceeds the tie bound. largest_gap: the largest of
    all positions, in logits. score: all evidence in one number; above `limit` it is too much.
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

    head [V, H]. At temperature 0, every token must be the argmax, except at near ties. Above 0, the
    tokens must not be too improbable. Only one chunk of logits is in memory at a time.
    """
    scores, gaps, units = [], [], []
    for logits, recorded in _chunks(last_TH, head, ids):
        gap = logits.amax(-1) - logits.gather(1, recorded[:, None])[:, 0]
        gaps.append(gap)
        # The coarsest dtype that servers use: that of the one which answered is not recorded.
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
