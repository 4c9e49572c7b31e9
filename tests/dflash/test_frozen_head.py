"""Loss and candidates against plain formulas."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dflash.frozen_head import ROWS_PER_CHUNK, Candidates, FrozenHeadLoss, divergence
from dflash.training_step import generator
from tests.helpers.tiny import distance


def plain_loss(logits, ids, probs, tv):
    """The same loss from a dense softmax, differentiated by autograd."""
    q = logits.softmax(-1)
    p = torch.zeros_like(q).scatter(1, ids, probs)
    entry = torch.zeros_like(q).scatter(1, ids, 1.0).bool()
    p_rest, q_rest = (1 - probs.sum(1)).clamp(min=0), (q * ~entry).sum(1)
    kl = (torch.xlogy(p, p) - p * q.log()).sum(1) + torch.xlogy(p_rest, p_rest)
    kl = kl - p_rest * q_rest.clamp(min=1e-30).log()
    distance = 0.5 * (((p - q) * entry).abs().sum(1) + (p_rest - q_rest).abs())
    return kl + tv * distance, 1 - distance


@pytest.mark.parametrize("entries", [1, 4, 31])
@pytest.mark.parametrize("tv", [0.0, 0.7])
def test_frozen_head_loss_equals_autograd(entries, tv):
    """Three chunks; hard labels, four entries and a rest, and entries for the whole vocabulary."""
    torch.manual_seed(0)
    hidden, head = torch.randn(1200, 8, requires_grad=True), torch.randn(31, 8)
    target, weights = (torch.randn(1200, 31) * 2).softmax(-1), torch.rand(1200)
    probs, ids = target.topk(entries)
    if entries == 1:
        probs = torch.ones_like(probs)
    loss, accepted, hits, *_ = FrozenHeadLoss.apply(hidden, head, torch.zeros(31), ids, probs, tv)
    (loss * weights).sum().backward()
    ours, hidden.grad = hidden.grad, None
    plain, overlap = plain_loss(hidden @ head.T, ids, probs, tv)
    (plain * weights).sum().backward()
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(accepted, overlap, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, hidden.grad, rtol=1e-4, atol=1e-5)
    assert torch.equal(hits, (hidden @ head.T).argmax(-1) == ids[:, 0])


@pytest.mark.parametrize("entries", [1, 4])
def test_frozen_head_loss_in_bfloat16_is_as_near_as_autograd(entries):
    """Control: autograd through the same bfloat16 product, against float32 of the same numbers."""
    torch.manual_seed(0)
    hidden, head = torch.randn(1200, 8).bfloat16(), torch.randn(31, 8).bfloat16()
    probs, ids = (torch.randn(1200, 31) * 2).softmax(-1).topk(entries)
    probs = torch.ones_like(probs) if entries == 1 else probs

    def both(states, rows):
        grads, losses = [], []
        for own in (True, False):
            given = states.clone().requires_grad_()
            if own:
                loss, *_ = FrozenHeadLoss.apply(given, rows, torch.zeros(31), ids, probs, 0.5)
            else:
                loss, _ = plain_loss((given @ rows.T).float(), ids, probs, 0.5)
            loss.sum().backward()
            losses.append(loss.detach())
            grads.append(given.grad)
        return losses, grads

    (exact, _), (exact_grad, _) = both(hidden.float(), head.float())
    (ours, theirs), (our_grad, their_grad) = both(hidden, head)
    assert our_grad.dtype == torch.bfloat16
    assert ours.dtype == torch.float32
    assert distance(ours, exact) <= 1.05 * distance(theirs, exact)
    assert distance(our_grad, exact_grad) <= 1.05 * distance(their_grad, exact_grad)
    assert distance(their_grad, exact_grad) > 1e-4, "the control measures something"


def test_entries_for_the_whole_vocabulary_give_the_plain_kl():
    torch.manual_seed(0)
    hidden, head, target = torch.randn(5, 8), torch.randn(31, 8), torch.randn(5, 31).softmax(-1)
    probs, ids = target.topk(31)
    loss, accepted, *_ = FrozenHeadLoss.apply(hidden, head, torch.zeros(31), ids, probs, 0.0)
    log_q = (hidden @ head.T).log_softmax(-1)
    plain = F.kl_div(log_q, target, reduction="none").sum(1)
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(accepted, torch.minimum(log_q.exp(), target).sum(1))


def test_a_hard_label_gives_the_cross_entropy_and_accepts_with_its_probability():
    torch.manual_seed(0)
    hidden, head, label = torch.randn(5, 8), torch.randn(31, 8), torch.randint(0, 31, (5, 1))
    hard = torch.ones(5, 1)
    loss, accepted, *_ = FrozenHeadLoss.apply(hidden, head, torch.zeros(31), label, hard, 0.0)
    torch.testing.assert_close(
        loss, F.cross_entropy(hidden @ head.T, label[:, 0], reduction="none")
    )
    torch.testing.assert_close(accepted, (-loss).exp())


def test_the_head_holds_one_chunk_of_logits_however_many_rows():
    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.most = max(self.most, out.untyped_storage().nbytes())
            return out

    rows, width, candidates = 4 * ROWS_PER_CHUNK, 8, 300
    hidden, head = torch.randn(rows, width, requires_grad=True), torch.randn(candidates, width)
    labels = torch.randint(candidates, (rows, 1))
    with Largest() as seen:
        loss, *_ = FrozenHeadLoss.apply(
            hidden, head, torch.zeros(candidates), labels, torch.ones(rows, 1), 0.0
        )
        loss.sum().backward()
    assert ROWS_PER_CHUNK * candidates * 4 <= seen.most <= ROWS_PER_CHUNK * (candidates + 1) * 4


def test_divergence_example():
    p, q = torch.tensor([[0.5, 0.25]]), torch.tensor([[0.25, 0.25]])
    loss, accepted, _ = divergence(q.log(), torch.tensor([[0.5]]), p, tv=0.0)
    assert loss.item() == pytest.approx(0.1733, abs=1e-4)
    assert accepted.item() == pytest.approx(0.75)
    with_tv, _, _ = divergence(q.log(), torch.tensor([[0.5]]), p, tv=2.0)
    assert with_tv.item() == pytest.approx(0.1733 + 2 * 0.25, abs=1e-4)


def test_candidates_estimate_the_full_partition_function():
    torch.manual_seed(0)
    head, hidden, seen = torch.randn(400, 8) * 0.3, torch.randn(8), torch.tensor([5, 9, 300])
    exact = (head @ hidden).logsumexp(0)
    candidates = Candidates(seen, 400, 100)
    draws = []
    for i in range(300):
        _, rows, correction = candidates.draw(head, generator(i))
        assert len(rows) == 103
        torch.testing.assert_close(rows[candidates.position[300]], head[300])
        draws.append((rows @ hidden + correction).exp().sum())
    torch.testing.assert_close(torch.stack(draws).mean().log(), exact, atol=0.01, rtol=0)
    _, rows, correction = Candidates(seen, 400, 400).draw(head, generator(0))
    torch.testing.assert_close((rows @ hidden + correction).logsumexp(0), exact)
