"""A tiny random target that vLLM serves in seconds, and a random drafter for it."""

from pathlib import Path

import pytest
import torch

TAPS = (1, 3)
VOCABULARY = 128


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory) -> Path:
    """A Llama of 6 layers, hidden 64, with a word tokenizer; logits wide enough to have no ties."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w0", eos_token="w1", unk_token="w2"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_drafter(tmp_path_factory) -> Path:
    """A random DFlash drafter of two layers and blocks of 4 for the tiny target."""
    from dflash.checkpoint import save_drafter
    from dflash.config import DrafterConfig
    from dflash.model import new_drafter

    config = DrafterConfig(
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
    folder = tmp_path_factory.mktemp("tiny") / "drafter"
    save_drafter(new_drafter(config, seed=0), folder, torch.float32)
    return folder
