"""A tiny random target on disk (real Transformers code, milliseconds per pass), and its drafter."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
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

from dflash.decode import Decoded, decode
from dflash.drafter_config import DrafterConfig
from dflash.model import Drafter, block_embeds, new_drafter
from dflash.replay import Replayable, Request
from dflash.target_model import Target, resolve_dtype

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
native_bfloat16 = pytest.mark.skipif(
    resolve_dtype("auto") != torch.bfloat16,
    reason="this CPU emulates bfloat16: vLLM rounds its products in another way than torch does "
    "(4 of 308 served tokens up to 5 % of a logit below ours), so `auto` is float32 here",
)
BFLOAT16 = 1e-2
"""Largest relative difference in bfloat16: a few roundings, each of up to 2**-9."""
ROUNDS = 0.98
"""Least share of replayed rounds that equal decoded ones in bfloat16 (measured: 0.9982, 0.9992)."""
KINDS: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def check_close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, **exact) -> None:
    """Check that two computations in `dtype` agree. In float32: within `exact`, the tolerances of
    assert_close. In bfloat16: the norm of the difference is below BFLOAT16 times that of `wanted`.
    """
    if dtype == torch.float32:
        torch.testing.assert_close(found, wanted, **exact)
    else:
        assert distance(found, wanted) < BFLOAT16


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference, relative to the norm of `wanted`."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def served(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    length: int,
    k: int,
    ends: Sequence[int] = (),
) -> tuple[Decoded, Request]:
    """An answer decoded with the drafter, and that answer harvested in one pass, to replay.

    The answer decoded without the drafter would not do: in bfloat16 they differ at near ties.
    """
    real = decode(target, prompt, length, ends, drafter, k)
    ids = [*prompt, *real.output_ids]
    features = target.features([ids], drafter.cfg.target_layer_ids)[0].taps
    return real, Request(torch.tensor(ids), len(prompt), features)


def check_rounds(walks: list[list[int]], answers: Sequence[Decoded], target: Target) -> None:
    """Check that replayed rounds equal the decoded ones. In bfloat16 only nearly all of them must:
    there features of one pass and of many passes differ by rounding.
    """
    wanted = [answer.accepted for answer in answers]
    if target.dtype == torch.float32:
        assert walks == wanted
    else:
        same = sum(len(set(begun(w)) & set(begun(a))) for w, a in zip(walks, wanted, strict=True))
        assert same >= ROUNDS * sum(map(len, wanted))


def begun(rounds: list[int]) -> list[tuple[int, int]]:
    """(token that a round begins with, drafts it accepts) of each round."""
    starts = itertools.accumulate((count + 1 for count in rounds), initial=0)
    return list(zip(starts, rounds, strict=False))


def make_target(folder: Path, kind: str = "llama", **shape: Any) -> Path:
    """Save a seeded random target of that architecture, float32."""
    config, model = KINDS[kind]
    torch.manual_seed(1)
    model(config(**SHAPE | shape)).save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path, vocab_size: int, template: str | None = None) -> Path:
    """Save a word tokenizer beside a target: w0 begins, w1 ends, w2 is unknown."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w0", eos_token="w1", unk_token="w2"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@torch.inference_mode()
def greedy_answers(
    target: Target, prompts: Sequence[Sequence[int]], length: int
) -> list[list[int]]:
    """Greedy answers of one length to prompts of one length, all as one batch; none ends."""
    model: Any = target.model
    ids = torch.tensor(prompts)
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=length,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found[:, ids.shape[1] :].tolist()


def learn(
    config: DrafterConfig, target: Target, requests: Sequence[Replayable], steps: int
) -> Drafter:
    """A drafter that has memorised these answers after seconds: most of them after 70 steps.

    The key norms of its layers differ from the start, as after long training. So a fault that
    mixes them up has an effect.
    """
    drafter = new_drafter(config, seed=0)
    with torch.no_grad():
        drafter.layers[0].self_attn.k_norm.weight.copy_(torch.linspace(0.3, 1.7, config.head_dim))
    ids = pad_sequence([r.ids for r in requests], batch_first=True)
    features = pad_sequence([r.features.float() for r in requests], batch_first=True)
    first = torch.tensor([[r.num_prompt] for r in requests])
    last = torch.tensor([[len(r.ids) - 1 - config.num_drafts] for r in requests])
    anchors = torch.minimum(first + torch.arange(int((last - first).max()) + 1), last)
    _fit(drafter, target, ids, features, anchors, steps, lr=1e-2)
    return drafter


def memorise(drafter: Drafter, target: Target, prompts: list[list[int]], length: int) -> None:
    """Teach a drafter the greedy answers to prompts of one length: in seconds, it accepts often."""
    taps, most = drafter.cfg.target_layer_ids, drafter.cfg.num_drafts
    rows = [p + decode(target, p, length + most).output_ids for p in prompts]
    features = torch.stack([found.taps for found in target.features(rows, taps)]).clone()
    ids = torch.tensor(rows)
    anchors = torch.arange(len(prompts[0]), ids.shape[1] - most).expand(len(rows), -1)
    _fit(drafter, target, ids, features, anchors, steps=60, lr=5e-3)


def _fit(drafter, target, ids, features, anchors, steps, lr):
    K = drafter.cfg.num_drafts
    labels = torch.stack([ids.gather(1, anchors + k) for k in range(1, K + 1)], -1)
    mask = drafter.cfg.mask_token_id
    embeds = block_embeds(target.embedding, ids.gather(1, anchors), mask, K + 1)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr)
    for _ in range(steps):
        hidden = drafter(drafter.context(features), embeds, anchors)[:, :, 1:]
        loss = cross_entropy((hidden @ target.head.T).flatten(0, -2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
