"""Sliding windows and causal blocks: who sees what, in training, replay and the served config."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from dflash.checkpoint import read_config, save_drafter
from dflash.drafter_config import DrafterConfig
from dflash.mask import dense_mask, visible
from dflash.model import block_embeds, new_drafter
from dflash.replay import replay
from tests.helpers.tiny import check_rounds, served

WINDOW = 8
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


@pytest.fixture
def sliding(config, causal, dtype):
    """A drafter of one layer: features reach a slot only directly, not by way of another slot."""
    cfg = replace(config, num_hidden_layers=1, sliding_window=WINDOW, is_causal=causal)
    drafter = new_drafter(cfg, seed=0)
    with torch.no_grad():  # so that what attention adds is not rounded away in bfloat16
        drafter.layers[0].self_attn.o_proj.weight.mul_(20)
    return drafter.to(dtype)


def changed_slots(drafter, target, sample, position, anchor=20):
    """Slots of one block whose output a change of the feature at `position` reaches."""
    embeds = block_embeds(target.embedding, torch.tensor([[3]]), drafter.cfg.mask_token_id, 6)
    features = sample.features[None].clone()
    with torch.no_grad():
        before = drafter(drafter.context(features), embeds, torch.tensor([[anchor]]))[0, 0]
        features[:, position] += 10.0
        after = drafter(drafter.context(features), embeds, torch.tensor([[anchor]]))[0, 0]
    return [j for j in range(6) if not torch.equal(before[j], after[j])]


@CAUSAL
def test_a_slot_sees_window_minus_one_positions_back(sliding, target, samples):
    """Slot j at position 20 + j sees the features above 12 + j, before the anchor."""
    reach = {p: changed_slots(sliding, target, samples[0], p) for p in (12, 13, 15, 18, 19, 20)}
    assert reach == {
        12: [],
        13: [0],
        15: [0, 1, 2],
        18: [0, 1, 2, 3, 4, 5],
        19: [0, 1, 2, 3, 4, 5],
        20: [],
    }


@CAUSAL
def test_slots_see_later_slots_unless_causal(sliding, target, samples, causal):
    context = sliding.context(samples[0].features[None])
    embeds = block_embeds(target.embedding, torch.tensor([[3]]), sliding.cfg.mask_token_id, 6)
    changed = embeds.clone()
    changed[:, :, 3] += 1.0
    with torch.no_grad():
        before = sliding(context, embeds, torch.tensor([[20]]))[0, 0]
        after = sliding(context, changed, torch.tensor([[20]]))[0, 0]
    seen = [j for j in range(6) if not torch.equal(before[j], after[j])]
    assert seen == ([3, 4, 5] if causal else [0, 1, 2, 3, 4, 5])


@CAUSAL
def test_the_mask_is_the_one_of_flash_attention(causal):
    """As in vLLM: a key is visible up to window - 1 to the left of the query's position, and
    as far to the right if not causal (flash_attn.py, `_maybe_symmetrize_window`)."""
    anchor, slots, context = 9, 6, 9
    mask = dense_mask(torch.tensor([[anchor]]), context, slots, WINDOW, causal)[0, 0]
    key = torch.arange(context + slots)  # served keys are contiguous: position = index
    query = anchor + torch.arange(slots)[:, None]
    right = 0 if causal else WINDOW - 1
    assert torch.equal(mask, (query - key < WINDOW) & (key - query <= right))


@CAUSAL
@pytest.mark.parametrize("window", [0, 5])
def test_dense_mask_is_the_flex_rule(window, causal):
    anchors, context, slots = torch.tensor([[3, 9, 14], [1, 2, 3]]), 16, 4
    rule = create_mask(
        lambda b, h, q, k: visible(anchors, b, q, k, context, slots, window, causal),
        *(2, 1, 12, 28, "cpu"),
    )
    assert torch.equal(rule, dense_mask(anchors, context, slots, window, causal))


@CAUSAL
def test_replay_equals_reference_decode_with_a_window(sliding, target, samples):
    prompts = [sample.ids[~sample.loss_mask].tolist() for sample in samples[:4]]
    answers = [served(target, sliding, prompt, 40, 5) for prompt in prompts]
    real, requests = zip(*answers, strict=True)
    check_rounds(replay(sliding, target.embedding, target.head, requests, 5), real, target)


@CAUSAL
def test_config_says_the_attention_in_every_key(sliding, tmp_path, causal):
    folder = save_drafter(sliding, tmp_path / "d", torch.bfloat16)
    raw = json.loads((folder / "config.json").read_text())
    assert raw["layer_types"] == ["sliding_attention"]
    assert (raw["sliding_window"], raw["use_sliding_window"]) == (WINDOW, True)
    assert raw["is_causal"] is causal
    assert read_config(folder) == sliding.cfg


def test_served_causality_follows_the_order_of_vllm(config):
    raw = replace(config, sliding_window=WINDOW).to_json("bfloat16")
    unsaid = {name: value for name, value in raw.items() if name != "is_causal"}
    assert DrafterConfig.from_json(unsaid).is_causal, "sliding layers are causal by default"
    said = unsaid | {"dflash_config": raw["dflash_config"] | {"causal": False}}
    assert not DrafterConfig.from_json(said).is_causal
    assert DrafterConfig.from_json(said | {"is_causal": True}).is_causal
    full = config.to_json("bfloat16")
    del full["is_causal"]
    assert not DrafterConfig.from_json(full).is_causal


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "all attend alike"),
        ({"use_sliding_window": False}, "without a window"),
        ({"sliding_window": 5}, "smaller than block_size 6"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"draft_vocab_size": 98}, r"draft_vocab_size 98 is outside 0\.\.96"),
        ({"target_hidden_size": 64}, "target_hidden_size = 64"),
        ({"rope_parameters": {"rope_theta": 1.0, "rope_type": "yarn"}}, "scaled RoPE"),
    ],
)
def test_attention_that_is_not_ours_is_refused(config, change, message):
    raw = replace(config, sliding_window=WINDOW).to_json("bfloat16") | change
    with pytest.raises(ValueError, match=message):
        DrafterConfig.from_json(raw)
