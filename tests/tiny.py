"""A tiny random target on disk: real Transformers code, milliseconds a pass."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "eos_token_id": 0,
}
KINDS: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make_target(folder: Path, kind: str = "llama") -> Path:
    """Save a seeded random target of that architecture, float32."""
    config, model = KINDS[kind]
    torch.manual_seed(1)
    model(config(**SHAPE)).save_pretrained(folder)
    return folder
