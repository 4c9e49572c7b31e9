"""The replay mix: how much of the training data comes from other domains than the adapted one.

Shares are counted in supervised block tokens, the unit of the loss, not in samples, because a long
answer weighs more than a short one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.batches import valid_anchors


@dataclass(frozen=True)
class Mix:
    """Indices of the adapted domain and of the others, and the share of picks from the others."""

    main: tuple[int, ...]
    others: tuple[int, ...] = ()
    share: float = 0.0


def replay_mix(
    domains: Sequence[str], weights: Sequence[float], domain: str, token_share: float
) -> Mix:
    """How often to draw samples of other domains, so that they give `token_share` of the block
    tokens.

    weights: block tokens of each sample. Let their mean be d in the domain and g in the others. A
    share p of picks from the others then gives p*g / (p*g + (1-p)*d) of the tokens. If `domain` is
    empty, all samples are `main`. Raises ValueError for a domain without samples, and for a share
    without other domains.
    """
    main = tuple(i for i, name in enumerate(domains) if not domain or name == domain)
    others = tuple(i for i, name in enumerate(domains) if domain and name != domain)
    if not main:
        raise ValueError(
            f"train.domain {domain!r} has no training sample; there are: "
            f"{', '.join(sorted(set(domains))[:10])}"
        )
    if not token_share:
        return Mix(main)
    if not others:
        raise ValueError(
            f"train.mix = {token_share} needs samples of other domains than {domain!r}: ingest "
            "some, or set train.mix=0"
        )
    d, g = (sum(weights[i] for i in part) / len(part) for part in (main, others))
    return Mix(main, others, token_share * d / (token_share * d + (1 - token_share) * g))


def block_tokens(
    loss_mask: Tensor, anchors: int, num_drafts: int, random_block: bool = False
) -> float:
    """Supervised slots that a sample gives on average when `anchors` of its anchors are drawn.

    A block counts up to its first unsupervised token. With random blocks, slot k of K exists in
    (K - k + 1) / K of the steps. Example: a mask that ends in 4 answer tokens, and K = 3. The three
    anchors give 3, 2 and 1 slots, so two of them give 4.0 on average. With random blocks they give
    2/3 * (3 + 2 * 2/3 + 1/3) = 3.1.
    """
    valid = valid_anchors(loss_mask)
    if not len(valid):
        return 0.0
    padded = torch.cat([loss_mask, loss_mask.new_zeros(num_drafts)])
    slots_K = padded[valid[:, None] + 1 + torch.arange(num_drafts)].long().cumprod(1).sum(0)
    share_K = torch.arange(num_drafts, 0, -1) / num_drafts if random_block else 1.0
    return float((slots_K * share_K).sum()) * min(anchors, len(valid)) / len(valid)
