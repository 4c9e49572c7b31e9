"""Invariants 1, 2, 3, 4 and 5 of the design, on tiny Llama- and Qwen3-shaped targets."""

import math

import pytest
import torch

import dflash.replay
from dflash.acceptance import num_rounds, positions, tau
from dflash.checkpoint import load_drafter, save_drafter
from dflash.model import block_embeds, new_drafter
from dflash.replay import Request, replay, replay_many
from tests.helpers.tiny import check_close, check_rounds, served

ANCHORS = torch.tensor([[7, 10, 20]])


def hidden(drafter, target, features, tokens, anchors=ANCHORS):
    embeds = block_embeds(target.embedding, tokens, drafter.cfg.mask_token_id, 6)
    with torch.no_grad():
        return drafter(drafter.context(features), embeds, anchors)


def requests(samples):
    return [Request(s.ids, int((~s.loss_mask).sum()), s.features) for s in samples]


def test_features_at_or_after_the_anchor_change_nothing(drafter, target, samples):
    features, tokens = samples[0].features[None], torch.tensor([[3, 4, 5]])
    before = hidden(drafter, target, features, tokens)
    changed = features.clone()
    changed[:, 10:] += 1.0
    after = hidden(drafter, target, changed, tokens)
    assert torch.equal(before[:, :2], after[:, :2]), (
        "blocks with anchors 7 and 10 saw feature >= 10"
    )
    assert not torch.equal(before[:, 2], after[:, 2]), "the block with anchor 20 must see it"
    changed = features.clone()
    changed[:, 9] += 1.0
    after = hidden(drafter, target, changed, tokens)
    assert not torch.equal(before[:, 1], after[:, 1]), "feature 9 is context of anchor 10"


def test_another_block_changes_nothing(drafter, target, samples):
    features = samples[0].features[None]
    before = hidden(drafter, target, features, torch.tensor([[3, 4, 5]]))
    after = hidden(drafter, target, features, torch.tensor([[3, 60, 5]]))
    assert torch.equal(before[:, [0, 2]], after[:, [0, 2]])
    assert not torch.equal(before[:, 1, 1:], after[:, 1, 1:]), "slots see their own anchor"


def test_another_sample_and_padding_change_nothing(drafter, target, samples):
    short, long = samples[0].features, samples[-1].features
    padded = torch.nn.utils.rnn.pad_sequence([short, long], batch_first=True)
    tokens = torch.tensor([[3, 4, 5], [6, 7, 8]])
    both = hidden(drafter, target, padded, tokens, ANCHORS.expand(2, 3))
    alone = hidden(drafter, target, short[None], tokens[:1])
    check_close(both[:1], alone, target.dtype, rtol=1e-5, atol=1e-5)


def test_block_attends_in_both_directions(drafter, target, samples):
    features = samples[0].features[None]
    context = drafter.context(features)
    embeds = block_embeds(target.embedding, torch.tensor([[3]]), drafter.cfg.mask_token_id, 6)
    changed = embeds.clone()
    changed[:, :, 5] += 1.0
    with torch.no_grad():
        before = drafter(context, embeds, torch.tensor([[9]]))
        after = drafter(context, changed, torch.tensor([[9]]))
    assert not torch.equal(before[:, :, 1], after[:, :, 1]), "slot 1 must see slot 5"


def test_training_forward_equals_stepwise_cached_forward(drafter, target, samples):
    """Many blocks over the whole context in one forward, against one block per forward on a context
    that grows token by token.
    """
    features, tokens = samples[0].features[None], samples[0].ids[ANCHORS]
    at_once = hidden(drafter, target, features, tokens)[0, :, 1:] @ target.head.T
    for n, anchor in enumerate(ANCHORS[0].tolist()):
        with torch.no_grad():
            parts = [drafter.context(features[:, t : t + 1], start=t) for t in range(anchor)]
            context = [
                (torch.cat([p[i][0] for p in parts], 2), torch.cat([p[i][1] for p in parts], 2))
                for i in range(len(drafter.layers))
            ]
            embeds = block_embeds(target.embedding, tokens[:, n : n + 1], 96, 6)
            alone = drafter(context, embeds, torch.tensor([[anchor]]))[0, 0, 1:] @ target.head.T
        check_close(at_once[n], alone, target.dtype, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_replay_equals_reference_decode_round_by_round(
    trained, target, samples, num_drafts, monkeypatch
):
    """With one anchor of each request in a forward, and with all of them."""
    prompts = [sample.ids[~sample.loss_mask].tolist() for sample in samples]
    answers = [served(target, trained, prompt, 40, num_drafts) for prompt in prompts]
    real, found = zip(*answers, strict=True)
    monkeypatch.setattr(dflash.replay, "PLACES_OF_A_SLOT", math.inf)
    for overhead in (0, math.inf):
        monkeypatch.setattr(dflash.replay, "SLOTS_OF_A_FORWARD", overhead)
        replayed = replay(trained, target.embedding, target.head, found, num_drafts)
        check_rounds(replayed, real, target)
    for answer, sample in zip(real, samples, strict=True):
        same = answer.output_ids == sample.ids[sample.loss_mask].tolist()
        assert same or target.dtype == torch.bfloat16, "drafting changed the text"
    assert num_rounds(replayed) < sum(int(s.loss_mask.sum()) - 1 for s in samples), "never accepted"


def test_replay_with_end_of_text_equals_reference_decode(trained, target, samples):
    """An answer that ends inside an accepted run is cut there, in both."""
    answers = []
    for sample in samples[:6]:
        prompt = sample.ids[~sample.loss_mask].tolist()
        answer = sample.ids[sample.loss_mask].tolist()
        end = answer[13]
        answers.append(served(target, trained, prompt, 40, 5, (end,)))
        length = answer.index(end) + 1
        assert answers[-1][0].output_ids == answer[:length] or target.dtype == torch.bfloat16
    real, short = zip(*answers, strict=True)
    check_rounds(replay(trained, target.embedding, target.head, short, 5), real, target)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9])
def test_replay_of_a_length_limit_equals_reference_decode(trained, target, samples, limit):
    """Answers shorter than a block, and one token, which comes from prefill and has no round."""
    answers = []
    for sample in samples:
        num_prompt = int((~sample.loss_mask).sum())
        real, short = served(target, trained, sample.ids[:num_prompt].tolist(), limit, 5)
        same = real.output_ids == sample.ids[num_prompt : num_prompt + limit].tolist()
        assert same or target.dtype == torch.bfloat16
        assert sum(real.accepted) + len(real.accepted) == limit - 1
        answers.append((real, short))
    real, short = zip(*answers, strict=True)
    check_rounds(replay(trained, target.embedding, target.head, short, 5), real, target)


def test_many_k_at_once_equal_each_k_alone_in_any_batch(trained, target, samples):
    borrowed, some = (target.embedding, target.head), requests(samples[:4])
    for k, walks in replay_many(trained, *borrowed, some, [2, 5]).items():
        assert walks == replay(trained, *borrowed, some, k, batch_tokens=1)
    with pytest.raises(ValueError, match=r"k=6 is outside 1\.\.5"):
        replay_many(trained, *borrowed, some, [1, 6])


def test_a_favourite_token_that_no_answer_holds_is_a_mismatch(drafter, target, samples):
    """A single request's answer holds few distinct tokens; here most drafts are other tokens."""
    prompts = [sample.ids[~sample.loss_mask].tolist() for sample in samples[:4]]
    answers = [served(target, drafter, prompt, 40, 5) for prompt in prompts]
    alone = [replay(drafter, target.embedding, target.head, [known], 5)[0] for _, known in answers]
    check_rounds(alone, [real for real, _ in answers], target)


def test_oracle_reaches_the_block_size_and_random_stays_near_one(config, target, samples):
    """A drafter that passes its input through proposes the mask token; an answer of mask tokens
    is then predicted perfectly."""
    oracle = new_drafter(config, seed=0).to(target.dtype)
    for layer in oracle.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    ids = torch.full((4 + 1 + 5 * 6,), 96)
    known = Request(ids, 4, torch.randn(len(ids), 96, generator=torch.Generator().manual_seed(0)))
    accepted = replay(oracle, target.embedding, target.embedding, [known], 5)
    assert accepted == [[5] * 5]
    assert tau(accepted) == config.block_size
    assert positions(accepted, 5) == [1.0] * 5
    blank = new_drafter(config, 3).to(target.dtype)
    rounds = replay(blank, target.embedding, target.head, requests(samples), 5)
    assert 1.0 <= tau(rounds) < 1.2


def test_zero_training_steps_export_the_base_bit_for_bit(drafter, tmp_path):
    base = save_drafter(drafter, tmp_path / "base", torch.bfloat16)
    again = save_drafter(load_drafter(base), tmp_path / "again", torch.bfloat16)
    for name in ("config.json", "model.safetensors"):
        assert (base / name).read_bytes() == (again / name).read_bytes()
