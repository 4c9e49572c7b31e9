"""Training, without a cluster: which samples and anchors a step takes, and one loss.

Nothing here keeps random state: order, anchors and candidates follow from (seed, step), so a
resumed run continues exactly, on any number of workers.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.loss import (
    Batch,
    Candidates,
    FrozenHeadLoss,
    Labels,
    Sample,
    make_batch,
    sample_anchors,
)
from dflash.model import Drafter, block_embeds
from dflash.objective import Weights


def generator(*key: object) -> torch.Generator:
    """A generator seeded by a hash of `key`: equal keys, equal numbers, on every machine."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def step_indices(step: int, num_samples: int, batch_size: int, seed: int) -> list[tuple[int, int]]:
    """The samples of a step as (epoch, index): epochs are permutations, laid end to end."""
    picks = []
    for i in range(step * batch_size, (step + 1) * batch_size):
        epoch, offset = divmod(i, num_samples)
        order = torch.randperm(num_samples, generator=generator("order", seed, epoch))
        picks.append((epoch, int(order[offset])))
    return picks


def random_drafts(num_drafts: int, seed: int, step: int) -> int:
    """Drafts of a step with a random block: uniform in 1..K, the same on every rank.

    Slot k is then trained in (K - k + 1) / K of the steps, and, as in serving with fewer drafts,
    without the mask tokens behind the block.
    """
    return 1 + int(torch.randint(num_drafts, (), generator=generator("block", seed, step)))


def step_batch(
    samples: Sequence[Sample],
    picks: Sequence[tuple[int, int]],
    anchors: int,
    num_drafts: int,
    labels: Labels,
    seed: int,
) -> Batch:
    """Samples of a step with fresh anchors, seeded by (seed, epoch, sample id)."""
    chosen = [
        sample_anchors(
            samples[i].loss_mask, anchors, generator("anchors", seed, epoch, samples[i].sample_id)
        )
        for epoch, i in picks
    ]
    return make_batch([samples[i] for _, i in picks], chosen, num_drafts, labels)


def mixed_precision(dtype: torch.dtype, device: str = "cpu") -> torch.autocast:
    """Products in `dtype` over float32 weights; a no-op for float32."""
    return torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32)


@dataclass(frozen=True)
class StepLoss:
    """Sums over the supervised slots: weighted loss (with graph), weight, argmax hits, slots."""

    loss: Tensor
    weight: Tensor
    hits: int
    slots: int


def step_loss(
    drafter: Drafter,
    batch: Batch,
    embedding: Tensor,
    head: Tensor,
    candidates: Candidates,
    draw: torch.Generator,
    weigh: Weights,
    tv: float = 0.0,
) -> StepLoss:
    """Forward of one batch. Divide `loss` by the weight summed over all ranks before backward.

    tv is the factor of the total-variation term beside the divergence from the labels.

    A batch without a supervised slot gives a zero loss on the same graph: no rank hangs. The
    drafter's weights are float32; products run in the dtype of `embedding` and `head`.
    """
    with mixed_precision(embedding.dtype, embedding.device.type):
        slots = batch.supervised_BNK.shape[-1] + 1
        context = drafter.context(batch.features_BTF.to(embedding.dtype))
        embeds = block_embeds(embedding, batch.anchor_tokens_BN, drafter.cfg.mask_token_id, slots)
        hidden = drafter(context, embeds, batch.anchors_BN)[:, :, 1:]
        index = batch.supervised_BNK.flatten().nonzero().flatten()
        head_rows, correction = candidates.draw(head, draw)
        loss, accepted, hits = FrozenHeadLoss.apply(
            hidden.reshape(-1, hidden.shape[-1])[index],
            head_rows,
            correction,
            candidates.position[batch.labels_BNKE.flatten(0, 2)[index]],
            batch.probs_BNKE.flatten(0, 2)[index],
            tv,
        )
        spread = torch.zeros_like(batch.supervised_BNK).flatten().index_put((index,), accepted)
        weights = weigh(spread.view_as(batch.supervised_BNK), batch.supervised_BNK)
        weights = weights.flatten()[index]
        return StepLoss((loss * weights).sum(), weights.sum(), int(hits.sum()), len(index))


def check_finite(loss: Tensor, batch_ids: Sequence[str], step: int) -> None:
    """Raise ValueError naming the samples of a step whose loss is not finite."""
    if not math.isfinite(float(loss)):
        raise ValueError(
            f"the loss of step {step} is {float(loss)}; its samples: {', '.join(batch_ids)}. "
            "Lower train.lr, or look at the features of these samples"
        )
