"""Refusals before vLLM starts, and what is read from its log."""

import json
import socket

import pytest

from serving import start_checks

TARGET = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
DRAFTER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "block_size": 8,
    "num_target_layers": 6,
    "dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 5},
}
LOG = """\
(APIServer pid=1) INFO 11-29 15:05:01 [model.py:733] Resolved architecture: LlamaForCausalLM
(EngineCore pid=2) INFO 11-29 15:05:14 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with
(EngineCore pid=2) INFO 11-29 15:05:30 [cpu_model_runner.py:68] Starting to load model /t...
(EngineCore pid=2) ERROR 11-29 15:05:31 [core.py:1000] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-29 15:05:31 [core.py:1000] ValueError: no room for the cache
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""


def folder(path, config):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(b"")
    return path


@pytest.fixture
def target(tmp_path):
    return folder(tmp_path / "target", TARGET)


def test_a_head_that_a_cpu_does_not_run_is_refused_before_the_start(tmp_path):
    """vLLM's V1 runner fails on it after a minute, in its engine process."""
    head = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
    dflash = DRAFTER["dflash_config"] | head
    drafter = folder(tmp_path / "drafter", DRAFTER | {"dflash_config": dflash})
    with pytest.raises(ValueError, match=r"DFlash 2's head.*GPU.*serve a plain DFlash drafter"):
        start_checks.check_head(drafter, on_cpu=True)
    start_checks.check_head(drafter, on_cpu=False)
    start_checks.check_head(folder(tmp_path / "plain", DRAFTER), on_cpu=True)
    start_checks.check_head(None, on_cpu=True)


def test_dflash2_is_served_with_one_k(tmp_path, target):
    """Its convolutions cut blocks by the largest K of the server, whatever the batch drafts."""
    head = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
    dflash = DRAFTER["dflash_config"] | head
    drafter = folder(tmp_path / "drafter", DRAFTER | {"dflash_config": dflash})
    assert start_checks.check_drafter(drafter, target, [5], 256) == (5,)
    with pytest.raises(ValueError, match=r"k = \[7, 4\].*one size of block.*such as \[7\]"):
        start_checks.check_drafter(drafter, target, [7, 4], 256)


def test_k_comes_from_the_block_unless_it_is_given(tmp_path, target):
    drafter = folder(tmp_path / "drafter", DRAFTER)
    assert start_checks.check_drafter(drafter, target, [], 256) == (7,)
    assert start_checks.check_drafter(drafter, target, [7, 7, 4], 256) == (7, 7, 4)
    assert start_checks.check_drafter(None, target, [], 256) == ()


@pytest.mark.parametrize("k", [[8], [-1], [7, -1]])
def test_k_outside_the_block_is_refused(tmp_path, target, k):
    drafter = folder(tmp_path / "drafter", DRAFTER)
    with pytest.raises(ValueError, match=r"k = \[.*\]: .* blocks of 8, so k lies in 0\.\.7"):
        start_checks.check_drafter(drafter, target, k, 256)


def test_k_may_be_0_for_some_batches_but_not_for_all(tmp_path, target):
    drafter = folder(tmp_path / "drafter", DRAFTER)
    assert start_checks.check_drafter(drafter, target, [7, 0], 256) == (7, 0)
    with pytest.raises(ValueError, match=r"k = \[0, 0\] drafts nothing at any batch size"):
        start_checks.check_drafter(drafter, target, [0, 0], 256)


def test_k_without_a_drafter_is_refused(target):
    with pytest.raises(ValueError, match=r"k = \[3\] needs a drafter"):
        start_checks.check_drafter(None, target, [3], 256)


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", 32), ("vocab_size", 64), ("num_target_layers", 9)]
)
def test_a_drafter_of_another_target_is_refused(tmp_path, target, key, value):
    drafter = folder(tmp_path / "drafter", DRAFTER | {key: value})
    with pytest.raises(ValueError, match=f"made for another target.*{value} != "):
        start_checks.check_drafter(drafter, target, [], 256)


def test_positions_must_cover_the_served_length_and_the_block(tmp_path, target):
    drafter = folder(tmp_path / "drafter", DRAFTER)
    assert start_checks.check_drafter(drafter, target, [], 505) == (7,)
    with pytest.raises(ValueError, match="lower max_model_len to 505"):
        start_checks.check_drafter(drafter, target, [], 506)


def test_a_folder_without_a_model_is_refused(tmp_path):
    drafter = folder(tmp_path / "drafter", DRAFTER)
    with pytest.raises(ValueError, match="is not a model folder"):
        start_checks.check_drafter(drafter, tmp_path / "nowhere", [], 256)


def test_a_target_with_its_decoder_in_text_config_is_named_as_not_supported(tmp_path):
    """It was once a KeyError: hidden_size is in text_config."""
    drafter = folder(tmp_path / "drafter", DRAFTER)
    nested = folder(tmp_path / "nested", {"model_type": "gemma3", "text_config": TARGET})
    with pytest.raises(ValueError, match=r"gemma3 keeps its decoder in text_config.*not supported"):
        start_checks.check_drafter(drafter, nested, [], 256)


def test_a_port_in_use_is_refused_and_zero_finds_a_free_one():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ValueError, match="is in use"):
            start_checks.free_port("127.0.0.1", other.getsockname()[1])
    assert start_checks.free_port("127.0.0.1", 0) > 0


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ValueError, match=r"cannot listen on 192\.0\.2\.77"):
        start_checks.free_port("192.0.2.77", 0)


def test_a_validation_error_keeps_the_line_that_explains_it():
    lines = [
        "(APIServer pid=1) pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "(APIServer pid=1)   Value error, max_model_len (9) is greater than 8",
        "(APIServer pid=1)     For further information visit",
    ]
    error = start_checks.last_error(lines)
    assert error is not None
    assert error.endswith("ModelConfig: Value error, max_model_len (9) is greater than 8")


def test_a_dead_engine_is_reported_with_what_killed_it():
    lines = [
        "(EngineCore pid=2) ERROR 11-29 23:19:52 [core.py:1512] RuntimeError: shape '[-1, 192]'",
        "(APIServer pid=1) ERROR 11-29 23:19:52 [async_llm.py:906] vllm.v1.engine.exceptions."
        "EngineDeadError: EngineCore encountered an issue. See stack trace (above)",
    ]
    assert start_checks.last_error(lines) == "RuntimeError: shape '[-1, 192]'"


def test_the_log_gives_phase_and_root_cause():
    lines = LOG.splitlines()
    assert start_checks.phase([]) == "importing vLLM"
    assert start_checks.phase(lines[:2]) == "starting the engine"
    assert start_checks.phase(lines) == "loading weights"
    assert start_checks.last_error(lines) == "ValueError: no room for the cache"
    assert start_checks.last_error(lines[:4]) is None
