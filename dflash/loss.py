"""The DFlash loss: random anchors, a divergence from sparse labels, a frozen borrowed head.

What a slot should predict and how much it counts is chosen in dflash/objective.py.

Shape suffixes: B sequences, T positions, N anchors, K = S-1 drafted slots, R supervised rows,
E entries of a label, H hidden, V vocabulary, C candidates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

ROWS_PER_CHUNK = 512
TINY = torch.finfo(torch.float32).tiny


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
    token. supervised_BNK: 1 where a slot counts, else 0.
    """

    features_BTF: Tensor
    anchors_BN: Tensor
    starts_BN: Tensor
    anchor_tokens_BN: Tensor
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
    starts_BN, tokens_BN = torch.zeros_like(anchors_BN), torch.zeros_like(anchors_BN)
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
            tokens_BN[r, first:last] = sample.ids[chosen]
            where = chosen[:, None] + 1 + torch.arange(num_drafts)
            inside = where < lengths[i]
            where = where.clamp(max=lengths[i] - 1)
            ids, probs = known[i]
            labels_BNKE[r, first:last], probs_BNKE[r, first:last] = ids[where].long(), probs[where]
            supervised_BNK[r, first:last] = (sample.loss_mask[where] & inside).float().cumprod(-1)
            start, first = end, last
    return Batch(
        features, anchors_BN, starts_BN, tokens_BN, labels_BNKE, probs_BNKE, supervised_BNK
    )


class Candidates:
    """A vocabulary sample for the training softmax: all tokens seen in the data plus random others.

    The full softmax over V costs most of a step. Tokens outside the seen set are never labels. A
    fresh random share of them stands for all; their logits are raised by log(1 / share), so that
    the partition function stays unbiased (sampled softmax with logQ correction, Bengio & Senecal
    2008).
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


class FrozenHeadLoss(torch.autograd.Function):
    """Per row KL(label || softmax(hidden @ head.T + correction)) + tv * total variation.

    Arguments: hidden [R, H], head [C, H], correction [C], label entries as candidate rows [R, E]
    with probabilities [R, E], tv a number. Returns three tensors [R]: loss, differentiable in
    `hidden` only; accepted, the probability that a draft sampled from this slot is accepted; hits
    (bool), whether the likeliest candidate is the label's first entry.

    Runs over chunks of rows and keeps one chunk of logits at a time, so memory does not grow with
    anchors x block x vocabulary. A row's gradient is linear in its weight. So weights are applied
    to the returned losses, and they may depend on `accepted`.
    """

    @staticmethod
    def forward(ctx, hidden_RH, head_CH, correction_C, labels_RE, probs_RE, tv):
        grad = torch.empty_like(hidden_RH)
        loss, accepted = torch.empty(2, len(hidden_RH), device=hidden_RH.device)
        hits = torch.zeros_like(labels_RE[:, 0], dtype=torch.bool)
        for start in range(0, len(hidden_RH), ROWS_PER_CHUNK):
            rows = slice(start, start + ROWS_PER_CHUNK)
            label = labels_RE[rows]
            logits = (hidden_RH[rows] @ head_CH.T).float()
            hits[rows] = logits.argmax(-1) == label[:, 0]
            logits += correction_C
            log_z = logits.logsumexp(-1, keepdim=True)
            log_q = logits.gather(1, label) - log_z
            q = logits.sub_(log_z).exp_().scatter_(1, label, 0.0)
            rest = q.sum(1, keepdim=True)
            loss[rows], accepted[rows], slope = divergence(log_q, rest, probs_RE[rows], tv)
            q.mul_(slope[:, -1:] / rest.clamp(min=TINY)).scatter_(1, label, slope[:, :-1])
            grad[rows] = q.to(head_CH.dtype) @ head_CH
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(accepted, hits)
        return loss, accepted, hits

    @staticmethod
    def backward(ctx, grad_loss, grad_accepted, grad_hits):
        (grad,) = ctx.saved_tensors
        return grad * grad_loss[:, None].to(grad.dtype), None, None, None, None, None


def divergence(
    log_q_RE: Tensor, q_rest_R1: Tensor, p_RE: Tensor, tv: float
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(p || q) + tv * TV(p, q), where all tokens without an entry form one bucket.

    log_q [R, E]: log-probabilities of the drafter at the label's entries; q_rest [R, 1]: its mass
    on everything else; p [R, E]: the label's probabilities. Returns loss [R]; 1 - TV(p, q) [R],
    the probability that rejection sampling accepts a draft drawn from q (Leviathan et al. 2023);
    and the loss's derivative in the logits, summed over each bucket, [R, E + 1].

    A hard label (E = 1, p = 1) gives the cross-entropy -log q, and is accepted with probability q.
    For other labels the bucket hides differences inside it, so KL and TV are lower bounds.
    Example: p = [0.5, 0.25], rest 0.25; q = [0.25, 0.25], rest 0.5:
    KL = 0.5 log 2 + 0.25 log 0.5 = 0.1733, TV = 0.5 * (0.25 + 0 + 0.25) = 0.25.
    """
    p = torch.cat([p_RE, (1 - p_RE.sum(1, keepdim=True)).clamp(min=0)], 1)
    q = torch.cat([log_q_RE.exp(), q_rest_R1], 1)
    log_q = torch.cat([log_q_RE, q_rest_R1.clamp(min=TINY).log()], 1)
    kl = (torch.xlogy(p, p) - p * log_q).sum(1)
    distance = 0.5 * (p - q).abs().sum(1)
    pull = 0.5 * (q - p).sign()
    slope = q - p + tv * q * (pull - (pull * q).sum(1, keepdim=True))
    return kl + tv * distance, 1 - distance, slope
