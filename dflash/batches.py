"""From samples to a batch: random anchors, their blocks, the labels of their slots.

Shape suffixes: B rows of sequences, T positions, N anchors, K = S-1 drafted slots, E entries of a
label, H hidden, F features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One training example. ids [T] int64, loss_mask [T] bool, features [T, n_taps*H].

    top_ids [n, k] int32 and top_logprobs [n, k] float16: the target's likeliest tokens at the last
    n positions (the answer), most likely first; None where nothing was captured.
    """

    sample_id: str
    domain: str
    ids: Tensor
    loss_mask: Tensor
    features: Tensor
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


def first_tokens(sample: Sample, length: int) -> Sample:
    """The first `length` tokens of a sample. Features that are read later must be cut alike.

    This is exact: the target is causal, so what it computed for these tokens does not depend on
    later ones.
    """
    behind = len(sample.ids) - length
    if behind <= 0:
        return sample
    top = (sample.top_ids, sample.top_logprobs)
    top_ids, top_logprobs = (t if t is None else t[: max(0, len(t) - behind)] for t in top)
    return replace(
        sample,
        ids=sample.ids[:length],
        loss_mask=sample.loss_mask[:length],
        features=sample.features[:length],
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


Labels = Callable[[Sample], tuple[Tensor, Tensor]]
"""Maps a sample to the label at every position, given as entries of a distribution over tokens:
(token ids [T, E], probabilities [T, E]). A hard label is one entry of probability 1."""


@dataclass(frozen=True)
class Batch:
    """Rows of samples with their anchors. Labels are those at the slots' own positions (no shift).

    anchors_BN and starts_BN: places in the row of each block's anchor and of its sample's first
    token. tokens_BNS: recorded tokens of each block, the anchor first. supervised_BNK: 1 where a
    slot counts, else 0.
    """

    features_BTF: Tensor
    anchors_BN: Tensor
    starts_BN: Tensor
    tokens_BNS: Tensor
    labels_BNKE: Tensor
    probs_BNKE: Tensor
    supervised_BNK: Tensor


def valid_anchors(loss_mask: Tensor) -> Tensor:
    """Positions a whose own token and next token are both supervised: [M] int64.

    A served block starts at an output token, so no anchor lies in the prompt.
    """
    return (loss_mask[:-1] & loss_mask[1:]).nonzero().flatten()


def sample_anchors(loss_mask: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """At most `count` different anchors of one sample, uniformly at random: [<=count] int64."""
    valid = valid_anchors(loss_mask)
    chosen = torch.randperm(len(valid), generator=generator)[:count]
    return valid[chosen].sort().values


def pack(lengths: Sequence[int]) -> list[list[int]]:
    """Distribute samples over rows as long as the longest sample: first fit, longest first.

    Returns the indices of the samples in each row. Example: lengths [5, 9, 4] -> [[1], [0, 2]].
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = (row for row, left in enumerate(room) if left >= lengths[i])
        row = next(fitting, len(rows))
        if row == len(rows):
            rows.append([])
            room.append(max(lengths))
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def make_batch(
    samples: Sequence[Sample],
    anchors: Sequence[Tensor],
    num_drafts: int,
    labels: Labels,
    packed: bool = False,
) -> Batch:
    """A padded batch of samples, one in each row or several (`packed`). Padding is not supervised.

    Packing needs less padding. But the attention of a row then spans all its samples, most of it
    masked. That pays where masked parts are skipped (flex attention), not with a dense mask
    (docs/decisions/028).

    Anchors are places in their own sample. A slot counts if every slot before it in its block is
    supervised too: a draft after an unsupervised token is never scored when serving.
    """
    lengths = [len(s.ids) for s in samples]
    rows = pack(lengths) if packed else [[i] for i in range(len(lengths))]
    most = max(1, max(sum(len(anchors[i]) for i in row) for row in rows))
    features = samples[0].features.new_zeros(len(rows), max(lengths), samples[0].features.shape[1])
    known = [labels(sample) for sample in samples]
    slots = (len(rows), most, num_drafts)
    anchors_BN = torch.zeros(slots[:2], dtype=torch.int64)
    starts_BN = torch.zeros_like(anchors_BN)
    tokens_BNS = torch.zeros(*slots[:2], num_drafts + 1, dtype=torch.int64)
    labels_BNKE = torch.zeros(*slots, known[0][0].shape[1], dtype=torch.int64)
    probs_BNKE = torch.zeros(labels_BNKE.shape)
    supervised_BNK = torch.zeros(slots)
    for r, row in enumerate(rows):
        start = first = 0
        for i in row:
            sample, chosen = samples[i], anchors[i]
            end, last = start + lengths[i], first + len(chosen)
            features[r, start:end] = sample.features
            anchors_BN[r, first:last] = start + chosen
            starts_BN[r, first:last] = start
            tokens_BNS[r, first:last, 0] = sample.ids[chosen]
            where = chosen[:, None] + 1 + torch.arange(num_drafts)
            inside = where < lengths[i]
            where = where.clamp(max=lengths[i] - 1)
            tokens_BNS[r, first:last, 1:] = sample.ids[where]
            ids, probs = known[i]
            labels_BNKE[r, first:last], probs_BNKE[r, first:last] = ids[where].long(), probs[where]
            supervised_BNK[r, first:last] = (sample.loss_mask[where] & inside).float().cumprod(-1)
            start, first = end, last
    return Batch(
        features, anchors_BN, starts_BN, tokens_BNS, labels_BNKE, probs_BNKE, supervised_BNK
    )
