"""A tiny random target on disk: real Transformers code, milliseconds a pass."""

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dflash.decode import decode
from dflash.model import Drafter, block_embeds
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


def make_target(folder: Path, kind: str = "llama") -> Path:
    """Save a seeded random target of that architecture, float32."""
    config, model = KINDS[kind]
    torch.manual_seed(1)
    model(config(**SHAPE)).save_pretrained(folder)
    return folder


def make_tokenizer(folder: Path, size: int, chat_template: str | None = None) -> None:
    """A tokenizer of the words w0 .. beside a target; w0 begins, w1 ends, w2 is unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="w0",
        eos_token="w1",
        unk_token="w2",
        chat_template=chat_template,
    ).save_pretrained(folder)


def memorise(drafter: Drafter, target: Target, prompts: list[list[int]], length: int) -> None:
    """Teach a drafter the greedy answers to prompts of one length: in seconds, it accepts often."""
    taps, most = drafter.cfg.target_layer_ids, drafter.cfg.num_drafts
    rows = [p + decode(target, p, length + most).output_ids for p in prompts]
    features = torch.stack([found.taps for found in target.features(rows, taps)]).clone()
    ids = torch.tensor(rows)
    anchors = torch.arange(len(prompts[0]), ids.shape[1] - most).expand(len(rows), -1)
    labels = torch.stack([ids.gather(1, anchors + k) for k in range(1, most + 1)], -1)
    tokens, mask = ids.gather(1, anchors), drafter.cfg.mask_token_id
    embeds = block_embeds(target.embedding, tokens, mask, most + 1)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for _ in range(60):
        hidden = drafter(drafter.context(features), embeds, anchors)[:, :, 1:]
        loss = cross_entropy((hidden @ target.head.T).flatten(0, -2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
