"""Sampling, and verification of drafts that keeps its distribution, both as in vLLM 0.32.

Shape suffixes: N rows, K drafts of a round, V vocabulary. Sources: vllm/v1/sample/
rejection_sampler.py and ops/topk_topp_sampler.py; the rule is modified rejection sampling
(arXiv 2211.17192).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

COLDEST = 0.01
"""vLLM raises temperatures between 0 and this value to this value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampler settings of a request, as vLLM names them; temperature 0 is greedy, top_k 0 off.

    Raises ValueError for values that vLLM refuses.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < -1:
            raise ValueError(f"{self}: temperature is >= 0, top_p in (0, 1], top_k >= -1")


GREEDY = Sampling()


def probabilities(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """The distributions the target samples from, [N, V] float32; greedy: one-hot at the argmax.

    Temperature first, then top_k (ties with the k-th stay), then top_p on what is left: the tail
    whose summed probability is at most 1 - top_p is removed, the likeliest token always stays.
    """
    logits = logits_NV.float()
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(1, logits.argmax(1, keepdim=True), 1.0)
    logits = logits / max(sampling.temperature, COLDEST)
    if 0 < sampling.top_k < logits.shape[1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, where = logits.sort(dim=1)
        tail = ordered.softmax(1).cumsum(1) <= 1 - sampling.top_p
        tail[:, -1] = False
        logits = logits.masked_fill(torch.zeros_like(tail).scatter_(1, where, tail), -torch.inf)
    return logits.softmax(1)


def draft_probabilities(logits_KV: Tensor, sampling: Sampling) -> Tensor:
    """What a probabilistic drafter samples from [K, V]. vLLM applies the temperature alone here."""
    return probabilities(logits_KV, Sampling(temperature=sampling.temperature))


def verify(
    p_NV: Tensor, drafts: Sequence[int], q_KV: Tensor | None, draw: torch.Generator
) -> tuple[int, int]:
    """One round: how many drafts are accepted, and the token that ends it.

    p_NV [K + 1, V]: the target's distribution after the anchor and after each draft. q_KV: the
    distribution that each draft was drawn from; None: greedy drafts, a one-hot q (vLLM's default
    for DFlash). Draft k is accepted with probability min(1, p_k / q_k). The first one that is not
    is replaced by a draw from max(p_k - q_k, 0). After K accepted drafts, the token is drawn from
    the last row of p.
    Example: p_1 = [.7, .3], greedy draft 0: accepted with probability .7, else token 1.
    """
    for k, token in enumerate(drafts):
        q = one_hot(torch.tensor(token), p_NV.shape[1]) if q_KV is None else q_KV[k]
        if float(p_NV[k, token]) < _uniform(draw) * float(q[token]):
            return k, _sample((p_NV[k] - q).clamp(min=0), draw)
    return len(drafts), _sample(p_NV[-1], draw)


def _uniform(draw: torch.Generator) -> float:
    """A draw from [0, 1), in float64 as in vLLM: a float32 draw is exactly 0 too often."""
    return float(torch.rand((), dtype=torch.float64, generator=draw))


def _sample(weights_V: Tensor, draw: torch.Generator) -> int:
    return int(torch.multinomial(weights_V, 1, generator=draw))
