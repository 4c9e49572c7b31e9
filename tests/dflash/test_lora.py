"""Low-rank additions: nothing before the first step, merged = unmerged, the base stays frozen."""

import pytest
import torch

from dflash.checkpoint import load_drafter, save_drafter
from dflash.frozen_head import Candidates
from dflash.lora import add_lora, merged
from dflash.losses import choose_weights, recorded_token
from dflash.model import block_embeds, drafter_of, new_drafter
from dflash.optim import build_optimizers
from dflash.training_step import generator, mixed_precision, step_batch, step_indices, step_loss
from tests.helpers.tiny import check_close

TARGETS = ["q_proj", "v_proj", "down_proj", "fc"]


@pytest.fixture
def base(config, tmp_path):
    """A stored drafter whose weights include negative zeros."""
    drafter = new_drafter(config, seed=0)
    with torch.no_grad():
        drafter.layers[0].self_attn.q_proj.weight[0] = -0.0
    return save_drafter(drafter, tmp_path / "base", torch.bfloat16)


def hidden(drafter, target, sample):
    embeds = block_embeds(target.embedding, torch.tensor([[3, 4]]), drafter.cfg.mask_token_id, 6)
    with torch.no_grad(), mixed_precision(target.dtype):
        context = drafter.context(sample.features[None])
        return drafter(context, embeds, torch.tensor([[7, 10]]))


def train(drafter, target, samples, steps):
    optimizers = build_optimizers(drafter, "adamw", 1e-2, torch.float32)
    candidates, weigh = Candidates(torch.arange(97), 97, 0), choose_weights("decay", 4.0)
    for step in range(steps):
        batch = step_batch(samples, step_indices(step, 12, 4, 0), 12, 5, recorded_token, 0)
        draw = generator(step)
        out = step_loss(drafter, batch, target.embedding, target.head, candidates, draw, weigh)
        (out.loss / out.weight).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_zero_lora_exports_the_base_bit_for_bit(base, tmp_path):
    adapted = add_lora(load_drafter(base), 4, TARGETS, seed=0)
    plain = drafter_of(adapted.cfg, merged(adapted.state_dict()))
    again = save_drafter(plain, tmp_path / "again", torch.bfloat16)
    for name in ("config.json", "model.safetensors"):
        assert (base / name).read_bytes() == (again / name).read_bytes()


def test_only_factors_train_and_the_merged_drafter_is_the_same_function(base, target, samples):
    adapted = add_lora(load_drafter(base), 4, TARGETS, seed=0)
    before = {name: t.clone() for name, t in adapted.state_dict().items()}
    train(adapted, target, samples, 3)
    changed = {n for n, t in adapted.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {n for n in before if n.endswith((".lora_a", ".lora_b"))}
    assert len(changed) == 2 * (2 * 3 + 1), "three matrices in two layers, and fc"
    plain = drafter_of(adapted.cfg, merged(adapted.state_dict()))
    merged_out, out = (hidden(d, target, samples[0]) for d in (plain, adapted))
    check_close(merged_out, out, target.dtype, rtol=1e-4, atol=1e-4)
    away = hidden(load_drafter(base), target, samples[0])
    assert (hidden(plain, target, samples[0]) - away).abs().max() > 1e-3


@pytest.mark.parametrize(("targets", "named"), [(["q_proj", "qproj"], "qproj names"), ([], "noth")])
def test_a_target_that_names_nothing_is_refused(base, targets, named):
    with pytest.raises(ValueError, match=named + r".*choose from fc, q_proj"):
        add_lora(load_drafter(base), 4, targets, seed=0)
