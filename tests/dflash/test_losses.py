"""Labels and weights: the examples of their docstrings, and what training makes of them."""

import pytest
import torch

from dflash.batches import Sample
from dflash.frozen_head import Candidates
from dflash.losses import (
    choose_labels,
    choose_weights,
    decay_weights,
    default_gamma,
    dpace,
)
from dflash.model import new_drafter
from dflash.target_model import top_logprobs
from dflash.training_step import generator, step_batch, step_indices, step_loss


@pytest.fixture(scope="module")
def captured(samples, target):
    """The samples with the whole distribution of the target at every output position."""
    found = []
    for s in samples:
        last = target.features([s.ids.tolist()], [1])[0].last
        first = int((~s.loss_mask).sum())
        ids, logprobs = top_logprobs(last[first - 1 : -1], target.head, 97)
        top = (ids.int(), logprobs.half())
        found.append(Sample(s.sample_id, s.domain, s.ids, s.loss_mask, s.features, *top))
    return found


def cut(samples, k):
    return [
        Sample(
            *(s.sample_id, s.domain, s.ids, s.loss_mask, s.features),
            *(s.top_ids[:, :k], s.top_logprobs[:, :k]),
        )
        for s in samples
    ]


def test_decay_weights_example():
    torch.testing.assert_close(
        decay_weights(2, 4.0), torch.tensor([1.0, 0.7788]), atol=1e-4, rtol=0
    )


def test_default_gamma_is_the_papers():
    assert [default_gamma(b) for b in (8, 10, 16)] == [4, 5, 7]
    assert default_gamma(4) == 2


def test_dpace_example():
    weights = dpace(torch.tensor([[[1.0, 0.0]]]), torch.ones(1, 1, 2))
    assert weights.tolist() == [[[1.5, 0.5]]]


@pytest.mark.parametrize(("q", "first"), [(0.0, 1.0), (0.9, 10.2)])
def test_dpace_grows_with_quality(q, first):
    """In blocks of 16 the first slot weighs about 1 for a useless drafter, 10 at quality 0.9."""
    weights = dpace(torch.full((1, 1, 15), q), torch.ones(1, 1, 15))
    assert weights[0, 0, 0].item() == pytest.approx(first, abs=0.05)


def test_dpace_ignores_what_is_not_supervised():
    q, short = torch.tensor([[[0.8, 0.6, 0.9]]]), torch.tensor([[[1.0, 1.0, 0.0]]])
    expected = torch.zeros(1, 1, 3)
    expected[..., :2] = dpace(q[..., :2], torch.ones(1, 1, 2))
    torch.testing.assert_close(dpace(q, short), expected)


def test_dpace_without_smoothing_is_the_gradient_of_the_expected_acceptance_length():
    torch.manual_seed(0)
    q = torch.rand(2, 3, 5, requires_grad=True)
    q.cumprod(-1).sum().backward()
    assert q.grad is not None
    weights = dpace(q, torch.ones(2, 3, 5), alpha=0.0)
    torch.testing.assert_close(weights, q.grad * q.detach(), rtol=1e-4, atol=1e-6)
    assert not weights.requires_grad


def test_the_argmax_of_the_target_is_the_recorded_greedy_token(captured, dtype):
    """In bfloat16 near ties are excepted: answers were decoded token by token, but captured in one
    pass.
    """
    agree = []
    for sample in captured:
        named, probs = choose_labels("argmax", 97)(sample)
        recorded, _ = choose_labels("ce", 97)(sample)
        agree.append((named.long() == recorded)[sample.loss_mask].flatten())
        assert probs.min() == 1
    assert torch.cat(agree).double().mean() >= (1 if dtype == torch.float32 else 0.95)


def test_label_of_a_position_is_the_targets_distribution_there(captured, target):
    sample = captured[3]
    with torch.no_grad():
        logits = target.model(sample.ids[None]).logits[0]
    ids, probs = choose_labels("kl", 97)(cut([sample], 5)[0])
    position = len(sample.ids) - 4
    expected = logits[position - 1].float().softmax(-1)[ids[position].long()]
    # float16 of the log-probabilities; a bfloat16 logit of 8 to 16 is rounded by 0.03.
    rough = {torch.float32: 2e-3, torch.bfloat16: 5e-2}[target.dtype]
    torch.testing.assert_close(probs[position], expected, rtol=rough, atol=1e-4)


def test_training_that_needs_log_probabilities_without_any_is_refused(samples):
    for loss in ("argmax", "kl"):
        with pytest.raises(ValueError, match=r"s0 carries no log-probabilities.*harvest\.top_k"):
            choose_labels(loss, 97)(samples[0])


CHOICES = [("ce", "dpace", 0.0), ("kl", "decay", 0.0), ("kl", "dpace", 0.5), ("argmax", "decay", 1)]


@pytest.mark.parametrize(("loss", "weights", "tv"), CHOICES)
def test_every_choice_trains(captured, target, config, loss, weights, tv):
    """One step lowers the loss of its own batch, with candidates that hold every label."""
    drafter, labels = new_drafter(config, seed=0), choose_labels(loss, 97)
    data = cut(captured, 5)
    named = torch.cat([labels(s)[0][s.loss_mask].flatten() for s in data]).unique().long()
    candidates = Candidates(named, 97, 40)
    drafts = {"decay": 5, "dpace": 3}[weights]  # fewer than the block's: a random block
    batch = step_batch(data, step_indices(0, 12, 4, 0), 12, drafts, labels, 0)

    def loss_now():
        borrowed = (target.embedding, target.head)
        weigh = choose_weights(weights, 4.0)
        out = step_loss(drafter, batch, *borrowed, candidates, generator("c"), weigh, tv)
        return out.loss / out.weight

    optimizer = torch.optim.SGD(drafter.parameters(), lr=0.1)
    before = loss_now()
    before.backward()
    optimizer.step()
    assert 0 < loss_now().item() < before.item()
