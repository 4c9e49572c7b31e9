"""What a slot should predict and how much it counts: one small function for each choice.

Labels (`train.loss`) turn a sample into a distribution over tokens at every position; weights
(`train.weights`) turn the slots' chances of acceptance into factors of their losses. Shape
suffixes as in dflash/batches.py.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dflash.batches import Labels, Sample

Weights = Callable[[Tensor, Tensor], Tensor]
"""From accepted [B, N, K] (chance that slot k's draft is accepted) and supervised [B, N, K] (0 or
1) to the weight of each slot, [B, N, K], 0 where it is not supervised."""

DPACE_ALPHA = 0.5


def choose_labels(loss: str, vocab_size: int) -> Labels:
    """The label function that `train.loss` names: ce, argmax or kl."""
    known: dict[str, Labels] = {
        "ce": recorded_token,
        "argmax": target_argmax,
        "kl": partial(target_distribution, vocab_size=vocab_size),
    }
    return known[loss]


def choose_weights(weights: str, gamma: float) -> Weights:
    """The weight function that `train.weights` names: decay (with gamma) or dpace."""
    known: dict[str, Weights] = {"decay": partial(decay, gamma=gamma), "dpace": dpace}
    return known[weights]


TOGETHER = 256
"""Samples whose labels are in memory at a time."""


def named_tokens(samples: Sequence[Sample], labels: Labels) -> Tensor:
    """The token ids in the labels of supervised positions, each once: int64 [M]."""
    found = torch.empty(0, dtype=torch.int64)
    for start in range(0, len(samples), TOGETHER):
        some = (samples[i] for i in range(start, min(start + TOGETHER, len(samples))))
        parts = [labels(s)[0][s.loss_mask].flatten().long() for s in some]
        found = torch.cat([found, *parts]).unique()
    return found


# ---- labels


def recorded_token(sample: Sample) -> tuple[Tensor, Tensor]:
    """The token of the answer itself, with probability 1 (paper, section 4): [T, 1] each."""
    ids = sample.ids[:, None]
    return ids, torch.ones(ids.shape)


def target_argmax(sample: Sample) -> tuple[Tensor, Tensor]:
    """The target's likeliest token, what greedy verification compares with: [T, 1] each.

    In greedy answers it is the recorded token, except at near ties. In sampled answers it may be
    another one.
    """
    ids = _captured(sample)[0][:, :1]
    return ids, torch.ones(ids.shape)


def target_distribution(sample: Sample, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The target's k likeliest tokens with their probabilities at temperature 1: [T, k] each.

    The probability that is missing to 1 belongs to all other tokens. With k = vocab_size nothing is
    missing (they are normalised against float16 rounding), and the loss is the full KL divergence.
    """
    ids, logprobs = _captured(sample)
    probs = logprobs.float().exp()
    if ids.shape[1] == vocab_size:
        probs /= probs.sum(1, keepdim=True)
    return ids, probs


def _captured(sample: Sample) -> tuple[Tensor, Tensor]:
    """Captured ids and log-probabilities moved to the sample's positions: [T, k] each."""
    if sample.top_ids is None or sample.top_logprobs is None:
        raise ValueError(
            f"sample {sample.sample_id} carries no log-probabilities of the target: train with "
            "train.loss=ce, or set harvest.top_k and run `flywheel harvest`"
        )
    before = len(sample.ids) - len(sample.top_ids)
    assert not sample.loss_mask[:before].any(), f"{sample.sample_id}: supervised before the answer"
    ahead = (0, 0, before, 0)
    return (
        torch.nn.functional.pad(sample.top_ids, ahead),
        torch.nn.functional.pad(sample.top_logprobs, ahead),
    )


# ---- weights


def default_gamma(block_size: int) -> float:
    """Decay by block size: 4, 5, 7 for blocks of 8, 10, 16 (paper, section 4).

    min(B / 2, (B + 5) / 3): the line through the last two points, and half the block size below.
    """
    return min(block_size / 2, (block_size + 5) / 3)


def decay_weights(num_drafts: int, gamma: float) -> Tensor:
    """w_k = exp(-(k-1)/gamma) for k = 1..K (paper, section 4); gamma 4, K 2: [1, 0.7788]."""
    return torch.exp(-torch.arange(num_drafts, dtype=torch.float32) / gamma)


def decay(accepted_BNK: Tensor, supervised_BNK: Tensor, gamma: float) -> Tensor:
    """Fixed decay, because a later slot counts only if all earlier ones are accepted."""
    weights = decay_weights(supervised_BNK.shape[-1], gamma).to(supervised_BNK.device)
    return supervised_BNK * weights


def dpace(accepted_BNK: Tensor, supervised_BNK: Tensor, alpha: float = DPACE_ALPHA) -> Tensor:
    """D-PACE: the effect of slot k on the expected acceptance length of its block (no gradient).

    With q_k the probability that draft k is accepted, E[accepted] = sum_j prod_{i<=j} q_i, and its
    derivative in log q_k is sum_{j>=k} prod_{i<=j} q_i. Here q_k is smoothed to
    s_k = (1 - alpha) q_k + alpha, so that a slot with q near 0 does not take the weight of those
    after it. An unsupervised slot has s = 1 and no term in the sum (m_j = 0):
    w_k = sum_{j>=k} m_j prod_{i<=j} s_i (speculators 0.9.0, `dpace_loss_decay`).
    Example: q = [1, 0], alpha = 0.5: s = [1, 0.5], products [1, 0.5], w = [1.5, 0.5].
    """
    q = accepted_BNK.detach()
    smooth = torch.where(supervised_BNK > 0, (1 - alpha) * q + alpha, 1.0)
    reach = smooth.cumprod(-1) * supervised_BNK
    return reach.flip(-1).cumsum(-1).flip(-1) * supervised_BNK
