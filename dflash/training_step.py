"""Training, without a cluster: which samples and anchors a step takes, and one loss.

Nothing here keeps random state: order, anchors and candidates follow from (seed, step), so a
resumed run continues exactly, on any number of workers.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
from torch import Tensor

from dflash.batches import Batch, Labels, Sample, make_batch, sample_anchors
from dflash.frozen_head import Candidates, FrozenHeadLoss
from dflash.losses import Weights
from dflash.model import Drafter, block_embeds


def generator(*key: object) -> torch.Generator:
    """A generator seeded by a hash of `key`: equal keys, equal numbers, on every machine."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


Pick = tuple[int, int]
"""(epoch, index of the sample)."""


def step_indices(
    step: int, num_samples: int, batch_size: int, seed: int, num_others: int = 0, share: float = 0.0
) -> list[Pick]:
    """The samples of a step: epochs are permutations of 0..num_samples-1, laid end to end.

    With a replay mix (dflash/domain_mix.py) the indices num_samples..num_samples+num_others-1 are a
    second such stream. Of the first i picks of a run, floor(i * share) come from it.
    """
    picks = []
    for i in range(step * batch_size, (step + 1) * batch_size):
        others = int(i * share)
        if int((i + 1) * share) > others:
            epoch, place = divmod(others, num_others)
            order = _permutation(num_others, "others", seed, epoch)
            picks.append((epoch, num_samples + order[place]))
        else:
            epoch, place = divmod(i - others, num_samples)
            picks.append((epoch, _permutation(num_samples, "order", seed, epoch)[place]))
    return picks


def random_drafts(num_drafts: int, seed: int, step: int) -> int:
    """Number of drafts of a step with a random block: uniform in 1..K, the same on every rank.

    Slot k is then trained in (K - k + 1) / K of the steps. A shorter block has no mask tokens after
    its end, as when fewer drafts are served.
    """
    return 1 + int(torch.randint(num_drafts, (), generator=generator("block", seed, step)))


@lru_cache(maxsize=4)
def _permutation(size: int, *key: object) -> list[int]:
    return torch.randperm(size, generator=generator(*key)).tolist()


def rank_picks(
    picks: Sequence[Pick], lengths: Sequence[int], rank: int, world: int, micro_batch: int
) -> list[list[Pick]]:
    """The picks of each forward of one rank in a step. Every rank has the same number of forwards,
    so that collectives match.

    Picks are dealt out by length, so that ranks get about equal work and a forward pads little.
    micro_batch: most samples of a forward; 0: one forward. A rank may get empty lists.
    """
    by_length = sorted(picks, key=lambda pick: lengths[pick[1]])
    most = -(-len(picks) // world)
    size = micro_batch or most
    mine = by_length[rank::world]
    return [mine[start : start + size] for start in range(0, most, size)]


def step_batch(
    samples: Sequence[Sample],
    picks: Sequence[Pick],
    anchors: int,
    num_drafts: int,
    labels: Labels,
    seed: int,
    packed: bool = False,
) -> Batch:
    """Samples of a forward with fresh anchors, seeded by (seed, epoch, sample id). Each sample is
    taken from `samples` only once, because that may read its features.

    packed: as in make_batch; it changes no result. Without picks: sample 0 without anchors, which
    gives a zero loss on the same graph.
    """
    if not picks:
        none = torch.zeros(0, dtype=torch.int64)
        return make_batch([samples[0]], [none], num_drafts, labels)
    chosen = [samples[i] for _, i in picks]
    drawn = draw_anchors(chosen, picks, anchors, seed)
    return make_batch(chosen, drawn, num_drafts, labels, packed)


def draw_anchors(
    chosen: Sequence[Sample], picks: Sequence[Pick], anchors: int, seed: int
) -> list[Tensor]:
    """Fresh anchors of the sample of every pick: int64 [<= anchors] each."""
    return [
        sample_anchors(
            sample.loss_mask, anchors, generator("anchors", seed, epoch, sample.sample_id)
        )
        for (epoch, _), sample in zip(picks, chosen, strict=True)
    ]


def to_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """The batch on `device`, features in `dtype`."""
    tensors = {f.name: getattr(batch, f.name).to(device) for f in fields(batch)}
    return replace(batch, **tensors | {"features_BTF": tensors["features_BTF"].to(dtype)})


def mixed_precision(dtype: torch.dtype, device: str = "cpu") -> torch.autocast:
    """Products in `dtype` over float32 weights; a no-op for float32."""
    return torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32)


@dataclass(frozen=True)
class StepLoss:
    """Sums over the supervised slots: weighted loss (with graph) and weight, both scalars; the
    number of right drafts and of slots at each draft position, int64 [K].
    """

    loss: Tensor
    weight: Tensor
    hits_K: Tensor
    slots_K: Tensor

    def sums(self) -> Tensor:
        """[loss, weight, hits_K, slots_K] without graph, float64 [2 + 2K]: add over forwards."""
        parts = (self.loss, self.weight, self.hits_K, self.slots_K)
        return torch.cat([part.detach().double().flatten() for part in parts])


def step_loss(
    drafter: Drafter,
    batch: Batch,
    embedding: Tensor,
    head: Tensor,
    candidates: Candidates,
    draw: torch.Generator,
    weigh: Weights,
    tv: float = 0.0,
    weigh_selector: Weights | None = None,
) -> StepLoss:
    """Forward of one batch. The gradient is that of a sum: divide it by the weight summed over all
    forwards of the step, on all ranks.

    tv is the factor of the total-variation term beside the divergence from the labels.
    weigh_selector: weights of DFlash 2's second loss (`selector_loss`); None: those of the first.

    A batch without a supervised slot gives a zero loss on the same graph, so that no rank waits for
    ever. The drafter's weights are float32; products run in the dtype of `embedding` and `head`.
    """
    with mixed_precision(embedding.dtype, embedding.device.type):
        slots = batch.supervised_BNK.shape[-1] + 1
        context = drafter.context(batch.features_BTF.to(embedding.dtype))
        anchor_tokens = batch.tokens_BNS[..., 0]
        embeds = block_embeds(embedding, anchor_tokens, drafter.cfg.mask_token_id, slots)
        hidden = drafter(context, embeds, batch.anchors_BN, batch.starts_BN)[:, :, 1:]
        index = batch.supervised_BNK.flatten().nonzero().flatten()
        hidden = hidden.reshape(-1, hidden.shape[-1])[index]
        tokens, head_rows, correction = candidates.draw(head, draw)
        recorded = candidates.position[batch.tokens_BNS[..., 1:].flatten()[index]]
        loss, accepted, hits, rivals, rival_logits = FrozenHeadLoss.apply(
            hidden,
            head_rows,
            correction,
            candidates.position[batch.labels_BNKE.flatten(0, 2)[index]],
            batch.probs_BNKE.flatten(0, 2)[index],
            tv,
            recorded,
            drafter.cfg.selector_top_k,
        )
        weights_BNK = weigh(_spread(accepted, index, batch), batch.supervised_BNK)
        weights = weights_BNK.flatten()[index]
        total = (loss * weights).sum()
        if drafter.candidate_selector is not None:
            previous = batch.tokens_BNS[..., :-1].flatten()[index]
            scores = drafter.rival_scores(hidden, rival_logits, tokens[rivals], previous)
            second, hits = selector_loss(scores, rivals == recorded[:, None])
            chances = _spread((-second).exp().detach(), index, batch)
            own = (weigh_selector or weigh)(chances, batch.supervised_BNK)
            total = total + (second * as_much(own, weights_BNK).flatten()[index]).sum()
        position = index % (slots - 1)
        counts = [p.bincount(minlength=drafter.cfg.num_drafts) for p in (position[hits], position)]
        return StepLoss(total, weights.sum(), *counts)


def _spread(values_R: Tensor, index_R: Tensor, batch: Batch) -> Tensor:
    """Values of the supervised slots at their places, 0 elsewhere: [B, N, K]."""
    empty = torch.zeros_like(batch.supervised_BNK)
    return empty.flatten().index_put((index_R,), values_R).view_as(empty)


def selector_loss(scores_RC: Tensor, is_recorded_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the recorded token among the candidates of each slot, and whether it has the
    best score: [R] each. Of each row of `is_recorded`, exactly one entry is true.
    """
    label = is_recorded_RC.long().argmax(1)
    loss = torch.nn.functional.cross_entropy(scores_RC.float(), label, reduction="none")
    return loss, scores_RC.argmax(1) == label


def as_much(weights_BNK: Tensor, others_BNK: Tensor) -> Tensor:
    """These weights, scaled so that each block weighs as much as by the others.

    So both losses of a drafter are divided by one number, whatever their weights.
    Example: [1, 1] against [3, 1] gives [2, 2].
    """
    sums = weights_BNK.sum(-1, keepdim=True)
    return weights_BNK * torch.where(sums > 0, others_BNK.sum(-1, keepdim=True) / sums, 0.0)


class NonFiniteLoss(ValueError):
    """A loss or gradient became NaN or infinite; trying the same step again gives the same."""


def check_finite(what: str, value: float, batch_ids: Sequence[str], step: int) -> None:
    """Raise NonFiniteLoss naming the samples of a step whose loss or gradient is not finite."""
    if not math.isfinite(value):
        raise NonFiniteLoss(
            f"the {what} of step {step} is {value}; its samples: {', '.join(batch_ids)}. "
            "Lower train.lr, or look at the features of these samples"
        )
