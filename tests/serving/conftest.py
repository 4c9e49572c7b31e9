"""A tiny random target that vLLM serves in seconds, and a random drafter for it."""

import asyncio
from pathlib import Path

import pytest
import torch

TAPS = (1, 3)
VOCABULARY = 128
LEARNED = [[0, 5 + i, 9, 20 + i] for i in range(6)]
"""Prompts whose greedy answers `learned_drafter` has memorised."""
ANSWER = 24


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory) -> Path:
    """A Llama of 6 layers, hidden 64, with a word tokenizer; logits are too far apart for ties."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.helpers.tiny import add_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    folder = tmp_path_factory.mktemp("tiny") / "target"
    LlamaForCausalLM(config).save_pretrained(folder)
    add_tokenizer(folder, VOCABULARY)
    return folder


@pytest.fixture(scope="session")
def tiny_drafter(tmp_path_factory) -> Path:
    """A random DFlash drafter of two layers and blocks of 4 for the tiny target."""
    from dflash.checkpoint import save_drafter
    from dflash.model import new_drafter

    folder = tmp_path_factory.mktemp("tiny") / "drafter"
    save_drafter(new_drafter(tiny_config(), seed=0), folder, torch.float32)
    return folder


@pytest.fixture(scope="session")
def learned_drafter(tmp_path_factory, tiny_target) -> Path:
    """The same drafter after a few seconds of training on the greedy answers to LEARNED: its drafts
    are accepted often.
    """
    from dflash.checkpoint import save_drafter
    from dflash.model import new_drafter
    from dflash.target_model import load_target
    from tests.helpers.tiny import memorise

    drafter = new_drafter(tiny_config(), seed=0)
    memorise(drafter, load_target(tiny_target, torch.float32), LEARNED, ANSWER)
    folder = tmp_path_factory.mktemp("tiny") / "learned"
    save_drafter(drafter, folder, torch.float32)
    return folder


def tiny_config():
    """The shape of the tiny drafters."""
    from dflash.drafter_config import DrafterConfig

    return DrafterConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        block_size=4,
        num_target_layers=6,
        target_layer_ids=TAPS,
        mask_token_id=3,
    )


@pytest.fixture
def drafters(tmp_path):
    """Folders of two drafters of one shape."""
    from dflash.checkpoint import save_drafter
    from dflash.model import new_drafter

    folders = [tmp_path / name for name in ("first", "second")]
    for seed, folder in enumerate(folders):
        save_drafter(new_drafter(tiny_config(), seed=seed), folder, torch.float32)
    return folders


@pytest.fixture
def site(tmp_path, drafters, monkeypatch):
    """A replica without vLLM that drafts with the first one."""
    from serving import loaded
    from tests.helpers.replica_site import TARGET, TOKEN, Site

    (tmp_path / "token").write_text(TOKEN + "\n")
    monkeypatch.setenv("FLYWHEEL_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("FLYWHEEL_TARGET_ID", TARGET)
    monkeypatch.setenv("FLYWHEEL_DRAFTER_VERSION", "1")
    monkeypatch.setattr(loaded, "_current", loaded.Loaded("", ""))
    made = Site(tmp_path / "arriving", drafters[0])
    asyncio.run(made.start())
    return made
