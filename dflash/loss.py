"""The DFlash loss: random anchors, decayed cross-entropy, a frozen borrowed head.

Shape suffixes: B sequences, T positions, N anchors, K = S-1 drafted slots, R supervised rows,
H hidden, V vocabulary, C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_PER_CHUNK = 512


@dataclass(frozen=True)
class Sample:
    """One training example. ids [T] int64, loss_mask [T] bool, features [T, n_taps*H]."""

    sample_id: str
    domain: str
    ids: Tensor
    loss_mask: Tensor
    features: Tensor


@dataclass(frozen=True)
class Batch:
    """Padded samples with their anchors. Labels are the tokens at the slots (no shift)."""

    features_BTF: Tensor
    anchors_BN: Tensor
    anchor_tokens_BN: Tensor
    labels_BNK: Tensor
    weights_BNK: Tensor
    """Loss weight of each slot, 0 where it is not supervised."""


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


def decay_weights(num_drafts: int, gamma: float) -> Tensor:
    """w_k = exp(-(k-1)/gamma) for k = 1..K (paper, section 4); gamma 4, K 2: [1, 0.7788]."""
    return torch.exp(-torch.arange(num_drafts, dtype=torch.float32) / gamma)


def make_batch(samples: Sequence[Sample], anchors: Sequence[Tensor], weights_K: Tensor) -> Batch:
    """Pad samples and anchors to one rectangle; padding has zero weight.

    A slot counts if every slot before it in its block is supervised too: a draft behind an
    unsupervised token is never scored when serving.
    """
    longest = max(len(s.ids) for s in samples)
    most = max(1, max(len(a) for a in anchors))
    width = samples[0].features.shape[1]
    features = samples[0].features.new_zeros(len(samples), longest, width)
    anchors_BN = torch.zeros(len(samples), most, dtype=torch.int64)
    tokens_BN = torch.zeros_like(anchors_BN)
    labels = torch.zeros(len(samples), most, len(weights_K), dtype=torch.int64)
    weights = torch.zeros(len(samples), most, len(weights_K))
    for i, (sample, chosen) in enumerate(zip(samples, anchors, strict=True)):
        n = len(chosen)
        features[i, : len(sample.ids)] = sample.features
        anchors_BN[i, :n] = chosen
        tokens_BN[i, :n] = sample.ids[chosen]
        where = chosen[:, None] + 1 + torch.arange(len(weights_K))
        inside = where < len(sample.ids)
        where = where.clamp(max=len(sample.ids) - 1)
        labels[i, :n] = sample.ids[where]
        supervised = (sample.loss_mask[where] & inside).long().cumprod(-1)
        weights[i, :n] = supervised * weights_K
    return Batch(features, anchors_BN, tokens_BN, labels, weights)


class Candidates:
    """A vocabulary sample for the training softmax: all tokens seen in the data plus random others.

    The full softmax over V costs most of a step. Tokens outside the seen set never are labels;
    a fresh random share of them stands for all, their logits raised by log(share^-1) so that the
    partition function stays unbiased (sampled softmax with logQ correction, Bengio & Senecal 2008).
    """

    def __init__(self, seen: Tensor, vocab_size: int, num_random: int):
        """seen: unique label ids [M]; num_random >= V - M means the exact full softmax."""
        unseen = torch.ones(vocab_size, dtype=torch.bool)
        unseen[seen] = False
        self.seen, self.unseen = seen, unseen.nonzero().flatten()
        self.num_random = min(num_random, len(self.unseen))
        self.position = torch.full((vocab_size,), -1, dtype=torch.int64)
        self.position[seen] = torch.arange(len(seen))

    def draw(self, head: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(head rows [C, H], logit correction [C]); label v is row `position[v]`."""
        chosen = torch.randperm(len(self.unseen), generator=generator)[: self.num_random]
        rows = head[torch.cat([self.seen, self.unseen[chosen]]).to(head.device)]
        correction = head.new_zeros(len(rows), dtype=torch.float32)
        if self.num_random:
            correction[len(self.seen) :] = _log(len(self.unseen) / self.num_random)
        return rows, correction


def _log(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).log())


class FrozenHeadCrossEntropy(torch.autograd.Function):
    """sum_r w_r * CE(hidden_r @ head.T + correction, label_r), gradient to `hidden` only.

    Runs over chunks of rows and keeps one chunk of logits at a time: memory does not grow with
    anchors x block x vocabulary. Also returns the number of rows whose argmax is the label.
    """

    @staticmethod
    def forward(ctx, hidden_RH, head_CH, correction_C, labels_R, weights_R):
        grad = torch.empty_like(hidden_RH)
        total = hidden_RH.new_zeros((), dtype=torch.float32)
        hits = torch.zeros_like(labels_R, dtype=torch.bool)
        for start in range(0, len(hidden_RH), ROWS_PER_CHUNK):
            rows = slice(start, start + ROWS_PER_CHUNK)
            logits = (hidden_RH[rows] @ head_CH.T).float()
            label = labels_R[rows, None]
            hits[rows] = logits.argmax(-1) == label[:, 0]
            logits += correction_C
            picked = logits.gather(1, label)
            log_z = logits.logsumexp(-1, keepdim=True)
            weight = weights_R[rows, None]
            total += ((log_z - picked) * weight).sum()
            probs = logits.sub_(log_z).exp_()
            probs.scatter_add_(1, label, -torch.ones_like(picked))
            grad[rows] = probs.mul_(weight).to(head_CH.dtype) @ head_CH
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx, grad_total, grad_hits):
        (grad,) = ctx.saved_tensors
        return grad * grad_total.to(grad.dtype), None, None, None, None


def supervised_rows(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """(index into the flattened [B*N*K] slots, labels [R], weights [R]) of the weighted slots."""
    flat = batch.weights_BNK.flatten()
    index = flat.nonzero().flatten()
    return index, batch.labels_BNK.flatten()[index], flat[index]
