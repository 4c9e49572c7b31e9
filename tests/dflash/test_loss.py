"""Loss, anchors, candidates and masks against plain formulas."""

import torch
from torch.nn import functional as F

from dflash.loss import (
    Candidates,
    FrozenHeadCrossEntropy,
    Sample,
    decay_weights,
    make_batch,
    sample_anchors,
    valid_anchors,
)
from dflash.mask import dense_mask, visible
from dflash.train import generator, step_indices


def test_decay_weights_example():
    torch.testing.assert_close(
        decay_weights(2, 4.0), torch.tensor([1.0, 0.7788]), atol=1e-4, rtol=0
    )


def test_valid_anchors_need_a_supervised_successor():
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 1], dtype=torch.bool)
    assert valid_anchors(mask).tolist() == [2, 3]


def test_anchors_are_distinct_seeded_and_all_when_few():
    mask = torch.ones(50, dtype=torch.bool)
    first = sample_anchors(mask, 16, generator(0, 1, "a"))
    assert torch.equal(first, sample_anchors(mask, 16, generator(0, 1, "a")))
    assert not torch.equal(first, sample_anchors(mask, 16, generator(0, 2, "a")))
    assert len(first.unique()) == 16
    assert sample_anchors(mask, 99, generator(0)).tolist() == list(range(49))


def test_batch_golden():
    """Two samples, block 4: labels are the tokens at the slots, weights end with the answer."""
    one = Sample("a", "d", torch.arange(10, 18), torch.arange(8) >= 3, torch.zeros(8, 2))
    two = Sample("b", "d", torch.arange(20, 25), torch.arange(5) >= 2, torch.zeros(5, 2))
    batch = make_batch([one, two], [torch.tensor([3, 5]), torch.tensor([2])], torch.ones(3))
    assert batch.anchor_tokens_BN.tolist() == [[13, 15], [22, 0]]
    assert batch.labels_BNK[0].tolist() == [[14, 15, 16], [16, 17, 17]]
    assert batch.weights_BNK[0].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.labels_BNK[1, 0].tolist() == [23, 24, 24]
    assert batch.weights_BNK[1].tolist() == [[1, 1, 0], [0, 0, 0]]


def test_frozen_head_cross_entropy_equals_autograd():
    torch.manual_seed(0)
    hidden = torch.randn(1200, 8, requires_grad=True)
    head, labels, weights = torch.randn(31, 8), torch.randint(0, 31, (1200,)), torch.rand(1200)
    loss, hits = FrozenHeadCrossEntropy.apply(hidden, head, torch.zeros(31), labels, weights)
    loss.backward()
    ours, hidden.grad = hidden.grad, None
    logits = hidden @ head.T
    plain = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    plain.backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(ours, hidden.grad)
    assert torch.equal(hits, logits.argmax(-1) == labels)


def test_candidates_estimate_the_full_partition_function():
    torch.manual_seed(0)
    head, hidden, seen = torch.randn(400, 8) * 0.3, torch.randn(8), torch.tensor([5, 9, 300])
    exact = (head @ hidden).logsumexp(0)
    candidates = Candidates(seen, 400, 100)
    draws = []
    for i in range(300):
        rows, correction = candidates.draw(head, generator(i))
        assert len(rows) == 103
        torch.testing.assert_close(rows[candidates.position[300]], head[300])
        draws.append((rows @ hidden + correction).exp().sum())
    torch.testing.assert_close(torch.stack(draws).mean().log(), exact, atol=0.01, rtol=0)
    rows, correction = Candidates(seen, 400, 400).draw(head, generator(0))
    torch.testing.assert_close((rows @ hidden + correction).logsumexp(0), exact)


def test_dense_mask_example():
    mask = dense_mask(torch.tensor([[3, 1]]), num_context=5, slots=2)[0, 0]
    assert mask.int().tolist() == [
        [1, 1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 1, 1],
        [1, 0, 0, 0, 0, 0, 0, 1, 1],
    ]


def test_flex_mask_rule_is_the_dense_mask():
    from torch.nn.attention.flex_attention import create_mask

    anchors, context, slots = torch.tensor([[3, 9, 14], [1, 2, 3]]), 16, 4
    rule = create_mask(
        lambda b, h, q, k: visible(anchors, b, q, k, context, slots), 2, 1, 12, 28, "cpu"
    )
    assert torch.equal(rule, dense_mask(anchors, context, slots))


def test_every_epoch_visits_every_sample_once():
    picks = [p for step in range(7) for p in step_indices(step, 7, 3, seed=5)]
    assert [e for e, _ in picks] == [0] * 7 + [1] * 7 + [2] * 7
    for epoch in range(3):
        assert sorted(i for e, i in picks if e == epoch) == list(range(7))
