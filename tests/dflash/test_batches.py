"""Anchors, batches, masks and the order of samples against plain formulas."""

from dataclasses import replace

import torch

from dflash.batches import Sample, first_tokens, make_batch, sample_anchors, valid_anchors
from dflash.losses import recorded_token, target_distribution
from dflash.mask import dense_mask, visible
from dflash.training_step import generator, random_drafts, step_indices


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
    """Two samples, block 4: labels are the tokens at the slots, up to the end of the answer."""
    one = Sample("a", "d", torch.arange(10, 18), torch.arange(8) >= 3, torch.zeros(8, 2))
    two = Sample("b", "d", torch.arange(20, 25), torch.arange(5) >= 2, torch.zeros(5, 2))
    batch = make_batch([one, two], [torch.tensor([3, 5]), torch.tensor([2])], 3, recorded_token)
    assert batch.tokens_BNS[..., 0].tolist() == [[13, 15], [22, 0]]
    assert batch.labels_BNKE[0, ..., 0].tolist() == [[14, 15, 16], [16, 17, 17]]
    assert batch.supervised_BNK[0].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.labels_BNKE[1, 0, :, 0].tolist() == [23, 24, 24]
    assert batch.supervised_BNK[1].tolist() == [[1, 1, 0], [0, 0, 0]]
    assert batch.probs_BNKE[1, 0].tolist() == [[1], [1], [1]]


def test_first_tokens_keep_their_labels():
    """Log-probabilities belong to the answer's positions, counted from the end."""
    top_ids, top_logprobs = torch.randint(50, (5, 2)).int(), torch.randn(5, 2).half()
    whole = Sample("a", "d", torch.arange(8), torch.arange(8) >= 3, torch.zeros(8, 2))
    whole = replace(whole, top_ids=top_ids, top_logprobs=top_logprobs)
    for length in (8, 6, 4, 2):
        cut = first_tokens(whole, length)
        assert len(cut.ids) == len(cut.loss_mask) == len(cut.features) == length
        for ours, theirs in zip(
            target_distribution(cut, 50), target_distribution(whole, 50), strict=True
        ):
            assert torch.equal(ours, theirs[:length])
    assert first_tokens(whole, 9) is whole
    without_features = replace(whole, features=torch.empty(0, 0))
    assert first_tokens(without_features, 4).features.shape == (0, 0)


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


def test_random_blocks_have_every_size_and_are_seeded():
    sizes = [random_drafts(7, seed=3, step=step) for step in range(200)]
    assert set(sizes) == set(range(1, 8))
    assert sizes == [random_drafts(7, seed=3, step=step) for step in range(200)]
