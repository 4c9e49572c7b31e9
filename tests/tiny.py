"""A tiny random target on disk: real Transformers code, milliseconds a pass; a drafter for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash.config import DrafterConfig
from dflash.model import Drafter, block_embeds, new_drafter
from dflash.replay import Request
from dflash.target import Target

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


def make_target(folder: Path, kind: str = "llama", **shape: Any) -> Path:
    """Save a seeded random target of that architecture, float32."""
    config, model = KINDS[kind]
    torch.manual_seed(1)
    model(config(**SHAPE | shape)).save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path, vocab_size: int, template: str | None = None) -> Path:
    """Save a word tokenizer beside a target: w0 begins, w1 ends, w2 is unknown."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w0", eos_token="w1", unk_token="w2"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def learn(
    config: DrafterConfig, target: Target, requests: Sequence[Request], steps: int
) -> Drafter:
    """A drafter that knows these answers by heart, after seconds: most of them after 70 steps.

    Its layers have unlike key norms from the start, as long training gives: a fault that mixes
    them up shows.
    """
    drafter, K = new_drafter(config, seed=0), config.num_drafts
    with torch.no_grad():
        drafter.layers[0].self_attn.k_norm.weight.copy_(torch.linspace(0.3, 1.7, config.head_dim))
    features = pad_sequence([r.features.float() for r in requests], batch_first=True)
    ids = pad_sequence([r.ids for r in requests], batch_first=True)
    first = torch.tensor([[r.num_prompt] for r in requests])
    last = torch.tensor([[len(r.ids) - 1 - K] for r in requests])
    anchors = torch.minimum(first + torch.arange(int((last - first).max()) + 1), last)
    labels = torch.stack([ids.gather(1, anchors + k) for k in range(1, K + 1)], -1)
    embeds = block_embeds(target.embedding, ids.gather(1, anchors), config.mask_token_id, K + 1)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(steps):
        hidden = drafter(drafter.context(features), embeds, anchors)[:, :, 1:]
        loss = cross_entropy((hidden @ target.head.T).flatten(0, -2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter
