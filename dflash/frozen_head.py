"""The loss behind the target's frozen head: a divergence from sparse labels, in chunks of rows.

What a slot should predict and how much it counts is chosen in dflash/losses.py.

Shape suffixes: R supervised slots, E entries of a label, H hidden, V vocabulary, C candidates.
"""

import torch
from torch import Tensor

ROWS_PER_CHUNK = 512
TINY = torch.finfo(torch.float32).tiny


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

    def draw(self, head: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens [C], their head rows [C, H], logit correction [C]); label v is row
        `position[v]`.
        """
        chosen = torch.randperm(len(self.unseen), generator=generator)[: self.num_random]
        tokens = torch.cat([self.seen, self.unseen[chosen]]).to(head.device)
        rows = head[tokens]
        correction = head.new_zeros(len(rows), dtype=torch.float32)
        if self.num_random:
            correction[len(self.seen) :] = _log(len(self.unseen) / self.num_random)
        return tokens, rows, correction


def _log(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).log())


class FrozenHeadLoss(torch.autograd.Function):
    """Per row KL(label || softmax(hidden @ head.T + correction)) + tv * total variation.

    Arguments: hidden [R, H], head [C, H], correction [C], label entries as candidate rows [R, E]
    with probabilities [R, E], tv a number; for a selector, recorded tokens as candidate rows [R]
    and the number of rivals n. Returns three tensors [R]: loss, differentiable in `hidden` only;
    accepted, the probability that a draft sampled from this slot is accepted; hits (bool), whether
    the likeliest candidate is the label's first entry. And what a selector chooses from, two
    tensors [R, n]: the likeliest candidate rows, in which the recorded token replaces the last one
    if it is not among them; and their logits, differentiable in `hidden`.

    Runs over chunks of rows and keeps one chunk of logits at a time, so memory does not grow with
    anchors x block x vocabulary. A row's gradient is linear in its weight. So weights are applied
    to the returned losses, and they may depend on `accepted`.
    """

    @staticmethod
    def forward(
        ctx, hidden_RH, head_CH, correction_C, labels_RE, probs_RE, tv, recorded_R=None, n=0
    ):
        grad = torch.empty_like(hidden_RH)
        loss, accepted = torch.empty(2, len(hidden_RH), device=hidden_RH.device)
        hits = torch.zeros_like(labels_RE[:, 0], dtype=torch.bool)
        rivals = labels_RE.new_empty(len(hidden_RH), n)
        rival_logits = loss.new_empty(rivals.shape)
        for start in range(0, len(hidden_RH), ROWS_PER_CHUNK):
            rows = slice(start, start + ROWS_PER_CHUNK)
            label = labels_RE[rows]
            logits = (hidden_RH[rows] @ head_CH.T).float()
            hits[rows] = logits.argmax(-1) == label[:, 0]
            if n:
                assert recorded_R is not None
                rivals[rows] = with_recorded(logits.topk(n).indices, recorded_R[rows])
                rival_logits[rows] = logits.gather(1, rivals[rows])
            logits += correction_C
            log_z = logits.logsumexp(-1, keepdim=True)
            log_q = logits.gather(1, label) - log_z
            q = logits.sub_(log_z).exp_().scatter_(1, label, 0.0)
            rest = q.sum(1, keepdim=True)
            loss[rows], accepted[rows], slope = divergence(log_q, rest, probs_RE[rows], tv)
            q.mul_(slope[:, -1:] / rest.clamp(min=TINY)).scatter_(1, label, slope[:, :-1])
            grad[rows] = q.to(head_CH.dtype) @ head_CH
        ctx.save_for_backward(grad, head_CH, rivals)
        ctx.mark_non_differentiable(accepted, hits, rivals)
        return loss, accepted, hits, rivals, rival_logits

    @staticmethod
    def backward(ctx, grad_loss, _accepted, _hits, _rivals, grad_rivals):
        grad, head, rivals = ctx.saved_tensors
        grad = grad * grad_loss[:, None].to(grad.dtype)
        for start in range(0, len(grad) if rivals.shape[1] else 0, ROWS_PER_CHUNK):
            rows = slice(start, start + ROWS_PER_CHUNK)
            grad[rows] += (grad_rivals[rows, None].to(head.dtype) @ head[rivals[rows]])[:, 0]
        return grad, *[None] * 7


def with_recorded(rivals_RN: Tensor, recorded_R: Tensor) -> Tensor:
    """The rivals, in descending order, with the recorded token instead of the last one where it is
    not among them. Example: [[4, 7], [4, 7]] and recorded [7, 9]: [[4, 7], [4, 9]].
    """
    missing = (rivals_RN != recorded_R[:, None]).all(1)
    last = torch.where(missing, recorded_R, rivals_RN[:, -1])
    return torch.cat([rivals_RN[:, :-1], last[:, None]], 1)


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
