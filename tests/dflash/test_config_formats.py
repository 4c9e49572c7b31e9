"""z-lab's and speculators' formats: converted both ways bit for bit, and read as by vLLM."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.checkpoint import convert_folder, load_drafter, read_config, save_drafter
from dflash.config_formats import to_speculators, to_zlab
from dflash.drafter_config import PUBLISHED_HEAD, DrafterConfig
from dflash.model import new_drafter

SHAPES = {
    "full": {},
    "sliding": {"sliding_window": 12},
    "sliding causal": {"sliding_window": 12, "is_causal": True},
    "dflash2": PUBLISHED_HEAD,
}


@pytest.fixture(params=SHAPES)
def shape(config, request):
    return replace(config, **SHAPES[request.param])


@pytest.fixture
def folders(shape, target_folder, tmp_path):
    """A z-lab folder, its speculators conversion, and that one's conversion back."""
    base = save_drafter(new_drafter(shape, seed=0), tmp_path / "zlab", torch.bfloat16)
    name = "org/target"
    convert_folder(base, tmp_path / "speculators", "speculators", target_folder, name)
    convert_folder(tmp_path / "speculators", tmp_path / "back", "zlab", target_folder, name)
    return base, tmp_path / "speculators", tmp_path / "back"


def speculators(config, **changes):
    return to_speculators(config.to_json("bfloat16"), "org/target", ["X"]) | changes


def test_there_and_back_is_bit_for_bit(folders):
    base, foreign, back = folders
    for name in ("config.json", "model.safetensors"):
        assert (base / name).read_bytes() == (back / name).read_bytes()
    assert (base / "model.safetensors").read_bytes() == (foreign / "model.safetensors").read_bytes()


def test_vllm_serves_both_formats_alike(folders):
    """Its own parser and its own rules of attention give the same shape, taps and causality."""
    pytest.importorskip("vllm")
    from vllm.model_executor.models.qwen3_dflash import _resolve_layer_attention
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    base, foreign, _ = folders
    zlab = json.loads((base / "config.json").read_text())
    raw = json.loads((foreign / "config.json").read_text())
    spec = SpeculatorsConfig.extract_vllm_speculative_config(raw)
    assert spec == {"method": "dflash", "num_speculative_tokens": 5}
    parsed = SpeculatorsConfig.extract_transformers_pre_trained_config(raw)
    assert zlab["dflash_config"].items() <= parsed["dflash_config"].items()
    assert parsed["architectures"] == zlab["architectures"]
    for key in DrafterConfig.__slots__:
        if key in zlab and key not in ("block_size", "num_target_layers", "is_causal"):
            assert parsed[key] == zlab[key], key
    resolve: Any = _resolve_layer_attention
    attention = resolve(SimpleNamespace(**zlab), 0)
    assert resolve(SimpleNamespace(**parsed), 0) == attention
    assert attention == (zlab["sliding_window"], zlab["is_causal"])


def test_a_speculators_folder_is_read_where_the_target_is_known(folders, shape):
    _, foreign, back = folders
    drafter = load_drafter(foreign, target_layers=6)
    assert drafter.cfg == shape
    for name, tensor in load_file(back / "model.safetensors").items():
        assert torch.equal(drafter.state_dict()[name], tensor.float())
    with pytest.raises(ValueError, match=r"speculators' format.*flywheel convert"):
        read_config(foreign)


def test_what_speculators_itself_writes_is_read(config):
    """A config that speculators 0.9.0 saved, of a drafter with causal sliding layers."""
    raw = json.loads((Path(__file__).parent / "data" / "speculators-0.9.0.json").read_text())
    expected = replace(config, sliding_window=12, is_causal=True)
    assert DrafterConfig.from_json(to_zlab(raw, 6)) == expected


def test_full_layers_beside_a_false_flag_stay_bidirectional(config):
    """speculators writes false by default and trains full layers bidirectionally, but vLLM
    reads it as the causality of all layers."""
    raw = speculators(config, sliding_window_non_causal=False)
    assert DrafterConfig.from_json(to_zlab(raw, 6)) == config


def test_borrowed_tensors_of_a_speculators_folder_are_left_out(folders, shape):
    _, foreign, _ = folders
    tensors = load_file(foreign / "model.safetensors")
    extra = {name: torch.ones(2) for name in ("embed_tokens.weight", "verifier_norm.weight")}
    save_file(tensors | extra, foreign / "model.safetensors")
    assert load_drafter(foreign, target_layers=6).cfg == shape
    save_file(tensors | {"d2t": torch.ones(2)}, foreign / "model.safetensors")
    with pytest.raises(ValueError, match="unknown d2t"):
        load_drafter(foreign, target_layers=6)
    save_file(tensors, foreign / "model.safetensors")
    (foreign / "mask_embedding.pt").touch()
    with pytest.raises(ValueError, match="mask embedding of its own"):
        load_drafter(foreign, target_layers=6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "'eagle3': only dflash"),
        ({"mask_token_id": None}, "lacks mask_token_id"),
        ({"sample_from_anchor": True}, "sample_from_anchor = True"),
        ({"target_hidden_size": 64}, "target_hidden_size = 64"),
        ({"aux_hidden_state_layer_ids": [0, 3]}, r"\[-1, 2\] must lie in 0\.\.4"),
        ({"aux_hidden_state_layer_ids": [2, 6]}, r"\[1, 5\] must lie in 0\.\.4"),
        ({"sliding_window_non_causal": None}, "trains them causal, vLLM serves them bidirectional"),
    ],
)
def test_what_cannot_be_read_is_refused(config, changes, message):
    raw = speculators(replace(config, sliding_window=12), **changes)
    with pytest.raises(ValueError, match=message):
        DrafterConfig.from_json(to_zlab(raw, 6))


def test_mixed_layers_and_full_causal_ones_are_refused(config):
    raw = speculators(replace(config, sliding_window=12))
    raw["transformer_layer_config"]["layer_types"][0] = "full_attention"
    with pytest.raises(ValueError, match="all attend alike"):
        DrafterConfig.from_json(to_zlab(raw, 6))
    with pytest.raises(ValueError, match="full causal layers"):
        speculators(replace(config, is_causal=True))


def test_an_existing_folder_is_not_overwritten(folders, target_folder):
    base, foreign, _ = folders
    with pytest.raises(ValueError, match=r"holds a drafter already: choose another convert\.dest"):
        convert_folder(base, foreign, "zlab", target_folder, "x")
