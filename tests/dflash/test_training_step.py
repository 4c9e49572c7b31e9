"""Which samples a step takes and on which rank, and that sums over forwards equal the batch's."""

from dataclasses import replace

import pytest
import torch

from dflash.batches import Sample, make_batch, pack
from dflash.domain_mix import block_tokens, replay_mix
from dflash.frozen_head import Candidates
from dflash.losses import choose_weights, recorded_token
from dflash.model import block_embeds, new_drafter
from dflash.optim import build_optimizers
from dflash.training_memory import activation_bytes, model_bytes
from dflash.training_step import (
    NonFiniteLoss,
    check_finite,
    generator,
    mixed_precision,
    rank_picks,
    step_batch,
    step_indices,
    step_loss,
)
from tests.helpers.tiny import check_close

# Losses are summed in float32, but their logits are rounded to bfloat16 (measured: 4e-5).
SUMS = {torch.float32: 1e-6, torch.bfloat16: 2e-4}


def test_mix_gives_the_share_of_block_tokens_and_visits_both_streams_evenly():
    domains = ["general"] * 30 + ["tickets"] * 10
    weights = [50.0] * 30 + [10.0 + i for i in range(10)]
    mix = replay_mix(domains, weights, "tickets", 0.25)
    assert [domains[i] for i in (*mix.main, *mix.others)] == ["tickets"] * 10 + ["general"] * 30
    assert mix.share < 0.25, "answers of the others are longer, so fewer of them are drawn"
    ordered = [weights[i] for i in (*mix.main, *mix.others)]
    drawn = [p for step in range(300) for p in step_indices(step, 10, 4, 0, 30, mix.share)]
    others = sum(ordered[i] for _, i in drawn if i >= 10)
    assert others / sum(ordered[i] for _, i in drawn) == pytest.approx(0.25, abs=0.01)
    counts = [sum(i == which for _, i in drawn) for which in range(40)]
    assert max(counts[:10]) - min(counts[:10]) <= 1
    assert max(counts[10:]) - min(counts[10:]) <= 1
    again = [
        p for step in reversed(range(300)) for p in step_indices(step, 10, 4, 0, 30, mix.share)
    ]
    assert sorted(again) == sorted(drawn), "a step does not depend on the steps before it"


def test_mix_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"'law' has no training sample; there are: a, b"):
        replay_mix(["a", "b"], [1.0, 1.0], "law", 0.0)
    with pytest.raises(ValueError, match="needs samples of other domains"):
        replay_mix(["a", "a"], [1.0, 1.0], "a", 0.5)
    assert replay_mix(["a", "b", "a"], [1.0] * 3, "a", 0.0).main == (0, 2)


def test_block_tokens_is_what_batches_hold_on_average():
    mask = torch.tensor([0, 0, 1, 1, 1, 1], dtype=torch.bool)
    assert block_tokens(mask, 2, 3) == 4.0
    assert block_tokens(mask, 2, 3, random_block=True) == pytest.approx(2 / 3 * (3 + 4 / 3 + 1 / 3))
    assert block_tokens(torch.tensor([1, 0, 1], dtype=torch.bool), 8, 3) == 0.0
    gaps = torch.rand(60, generator=torch.Generator().manual_seed(0)) < 0.7
    sample = Sample("s", "d", torch.arange(60), gaps, torch.zeros(60, 1))
    slots = [
        int(step_batch([sample], [(e, 0)], 6, 5, recorded_token, 0).supervised_BNK.sum())
        for e in range(600)
    ]
    assert sum(slots) / 600 == pytest.approx(block_tokens(gaps, 6, 5), rel=0.03)


@pytest.mark.parametrize(("batch", "world", "micro"), [(7, 2, 2), (1, 3, 0), (4, 1, 3), (6, 2, 0)])
def test_ranks_share_a_step_in_equally_many_forwards(batch, world, micro):
    picks = [(0, i) for i in range(batch)]
    lengths = [10 * (i * 5 % 7) for i in range(batch)]
    ranks = [rank_picks(picks, lengths, rank, world, micro) for rank in range(world)]
    assert len({len(forwards) for forwards in ranks}) == 1, "collectives would not meet"
    assert sorted(p for forwards in ranks for f in forwards for p in f) == picks
    assert all(len(f) <= (micro or batch) for forwards in ranks for f in forwards)


@pytest.fixture
def gradients(config, samples, target, weights):
    """The gradient of a step cut into forwards, divided by the weight of all."""
    candidates, weigh = Candidates(torch.arange(97), 97, 0), choose_weights(weights, 4.0)

    def of(forwards):
        drafter = new_drafter(config, seed=0)
        sums = []
        for picks in forwards:
            batch = step_batch(samples, picks, 12, 5, recorded_token, 0)
            borrowed = (target.embedding, target.head)
            out = step_loss(drafter, batch, *borrowed, candidates, generator("c"), weigh)
            out.loss.backward()
            sums.append(out.sums())
        total = torch.stack(sums).sum(0)
        return total, [p.grad / total[1] for p in drafter.parameters() if p.grad is not None]

    return of


@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_micro_batches_with_an_empty_one_give_the_gradient_of_the_batch(gradients, dtype):
    """Uneven parts (5, 2, 0 samples): a mean of means would weigh them wrongly."""
    picks = [(0, i) for i in range(7)]
    whole_sums, whole = gradients([picks])
    part_sums, parts = gradients([picks[:5], picks[5:], []])
    torch.testing.assert_close(part_sums, whole_sums, rtol=SUMS[dtype], atol=0)
    assert len(parts) == len(whole) == 25
    for one, other in zip(parts, whole, strict=True):
        assert one.dtype == torch.float32, "what accumulates is not bfloat16"
        check_close(one, other, dtype, rtol=1e-4, atol=1e-6)


def test_pack_example():
    assert pack([5, 9, 4]) == [[1], [0, 2]]
    assert pack([3, 3]) == [[0], [1]]


@pytest.mark.parametrize("window", [0, 20])
def test_packed_documents_give_the_gradient_of_separate_ones(config, samples, target, window):
    """Rows of one length with several documents in them, against one forward per document."""
    config = replace(config, sliding_window=window)
    lengths = [45, 20, 24, 30, 15]
    cut = [
        replace(s, ids=s.ids[:n], loss_mask=s.loss_mask[:n], features=s.features[:n])
        for s, n in zip(samples[:5], lengths, strict=True)
    ]
    assert sorted(map(len, pack(lengths))) == [1, 2, 2]
    candidates, weigh = Candidates(torch.arange(97), 97, 0), choose_weights("decay", 4.0)

    def gradients(forwards, packed=True):
        drafter = new_drafter(config, seed=0)
        total = 0
        for picks in forwards:
            batch = step_batch(cut, picks, 6, 5, recorded_token, 0, packed)
            borrowed = (target.embedding, target.head)
            out = step_loss(drafter, batch, *borrowed, candidates, generator("c"), weigh)
            out.loss.backward()
            total = total + out.sums()
        return total, [p.grad for p in drafter.parameters()]

    picks = [(0, i) for i in range(5)]
    separate = gradients([[pick] for pick in picks])
    for sums, grads in (gradients([picks]), gradients([picks], packed=False)):
        torch.testing.assert_close(sums, separate[0], rtol=SUMS[target.dtype], atol=0)
        for one, other in zip(grads, separate[1], strict=True):
            assert one is not None
            assert other is not None
            check_close(one, other, target.dtype, rtol=1e-4, atol=1e-5)


def test_a_packed_document_never_sees_its_neighbours(drafter, target, samples):
    """Three documents, the last two in one row: new features of one change only its own blocks."""
    cut = [
        replace(s, ids=s.ids[:n], loss_mask=s.loss_mask[:n], features=s.features[:n])
        for s, n in zip(samples[:3], [45, 22, 20], strict=True)
    ]
    anchors = [torch.tensor([20, 30]), torch.tensor([8, 12, 15]), torch.tensor([9, 14])]

    def hidden(documents):
        batch = make_batch(documents, anchors, 5, recorded_token, packed=True)
        assert batch.starts_BN.tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 22, 22]]
        embeds = block_embeds(target.embedding, batch.tokens_BNS[..., 0], 96, 6)
        context = drafter.context(batch.features_BTF)
        with torch.no_grad():
            return drafter(context, embeds, batch.anchors_BN, batch.starts_BN)[1]

    before = hidden(cut)
    for changed, others in ((1, slice(3, 5)), (2, slice(0, 3))):
        other = replace(cut[changed], features=torch.randn_like(cut[changed].features))
        after = hidden([*cut[:changed], other, *cut[changed + 1 :]])
        assert torch.equal(before[others], after[others])
        assert not torch.equal(before, after)


@pytest.mark.parametrize("weights", ["decay"])
def test_an_empty_forward_has_zero_gradients_for_every_parameter(gradients):
    sums, grads = gradients([[(0, 1)], []])
    alone_sums, alone = gradients([[(0, 1)]])
    assert torch.equal(sums, alone_sums)
    for one, other in zip(grads, alone, strict=True):
        assert torch.equal(one, other)


def test_non_finite_loss_names_the_samples():
    with pytest.raises(NonFiniteLoss, match=r"step 7 is nan; its samples: a, b"):
        check_finite("loss", float("nan"), ["a", "b"], 7)


def test_flex_attention_equals_the_dense_path(monkeypatch, drafter, target, samples):
    """The CUDA branch of the model, run eagerly on this CPU: mask, layout and grouped heads."""
    import dflash.model as model
    from dflash.mask import dense_mask, flex_mask

    context = drafter.context(torch.stack([s.features[:40] for s in samples[:2]]))
    anchors = torch.tensor([[7, 10, 20], [12, 30, 31]])
    embeds = block_embeds(target.embedding, torch.tensor([[3, 4, 5], [6, 7, 8]]), 96, 6)
    starts = torch.tensor([[0, 0, 15], [0, 26, 26]])
    monkeypatch.setattr(model, "fused_flex", lambda: model.flex_attention)
    outputs = []
    for make_mask in (dense_mask, flex_mask):
        monkeypatch.setattr(model, "dense_mask", make_mask)
        with torch.no_grad():
            outputs.append(drafter(context, embeds, anchors, starts))
    check_close(outputs[0], outputs[1], target.dtype, rtol=1e-5, atol=1e-5)


def test_memory_counts_are_those_of_a_real_step(config, dtype):
    """Counted on fake tensors, against the storages of a real forward and real optimizers."""
    drafter = new_drafter(config, seed=0)
    weights = sum(p.nbytes for p in drafter.parameters())
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    embeds, features = torch.zeros(2, 9, 6, 32, dtype=dtype), torch.zeros(2, 50, 96, dtype=dtype)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with mixed_precision(dtype), hooks:
        drafter(drafter.context(features), embeds, torch.full((2, 9), 5))
    for param in drafter.parameters():
        kept.pop(param.untyped_storage().data_ptr(), None)
    real = sum(storage.nbytes() for storage in kept.values())
    assert activation_bytes(config, 2, 50, 9, dtype) == real
    for kind in ("muon", "adamw"):
        optimizers = build_optimizers(drafter, kind, 1e-3, torch.float32)
        for param in drafter.parameters():
            param.grad = torch.zeros_like(param)
        for optimizer in optimizers:
            optimizer.step()
        state = sum(
            t.nbytes for o in optimizers for values in o.state.values() for t in values.values()
        )
        assert model_bytes(config, kind, 1) == {
            "weights": weights,
            "gradients": weights,
            "optimizer": state,
        }
