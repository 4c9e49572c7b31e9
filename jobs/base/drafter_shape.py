"""The drafter's shape, derived once from the target's config and the `drafter` section."""

from dataclasses import replace
from typing import Any

import torch

from dflash.checkpoint import stored_dtype
from dflash.drafter_config import PUBLISHED_HEAD, DrafterConfig
from jobs.base.config import Config
from jobs.base.target_facts import target_config, target_taps, target_tokenizer


def target_fields(cfg: Config) -> dict[str, Any]:
    """Fields of DrafterConfig that are the same for every drafter of this target and these taps."""
    target = target_config(cfg)
    return {
        "hidden_size": target["hidden_size"],
        "vocab_size": target["vocab_size"],
        "num_target_layers": target["num_hidden_layers"],
        "target_layer_ids": target_taps(cfg),
    }


def misfits(cfg: Config, shape: DrafterConfig) -> dict[str, tuple[Any, Any]]:
    """{field: (the drafter's, what this target and these features need)}, where they differ."""
    needed = target_fields(cfg).items()
    return {k: (getattr(shape, k), value) for k, value in needed if getattr(shape, k) != value}


def drafter_config(cfg: Config) -> DrafterConfig:
    """The shape of a new drafter: the target's widths, plain RoPE with the target's base frequency,
    depth and block size from the `drafter` section.
    """
    target = target_config(cfg)
    rope = target.get("rope_parameters") or target
    heads, reduced = target["num_attention_heads"], cfg.drafter.draft_vocab
    plain = DrafterConfig(
        **target_fields(cfg),
        intermediate_size=target["intermediate_size"],
        num_hidden_layers=cfg.drafter.layers,
        num_attention_heads=heads,
        num_key_value_heads=target.get("num_key_value_heads", heads),
        head_dim=target.get("head_dim") or target["hidden_size"] // heads,
        max_position_embeddings=target["max_position_embeddings"],
        rms_norm_eps=target["rms_norm_eps"],
        rope_theta=rope.get("rope_theta", 10000.0),
        block_size=cfg.drafter.block_size,
        mask_token_id=mask_token(cfg, target["vocab_size"]),
        sliding_window=cfg.drafter.sliding_window,
        draft_vocab_size=reduced if reduced < target["vocab_size"] else 0,
    )
    second = cfg.drafter.head == "dflash2"
    return replace(plain, draft_vocab_size=0, **PUBLISHED_HEAD) if second else plain


def warm_shape(cfg: Config, base: DrafterConfig) -> DrafterConfig:
    """The shape of a drafter that starts from `base`: its own, with train.block_size, and with
    DFlash 2's head if drafter.head asks for one and it has none. Such a head drafts from the whole
    vocabulary, also where the base's is reduced.
    """
    sized = replace(base, block_size=cfg.train.block_size or base.block_size)
    if cfg.drafter.head == "dflash" or base.is_dflash2:
        return sized
    return replace(sized, draft_vocab_size=0, **PUBLISHED_HEAD)


def export_dtype(cfg: Config) -> torch.dtype:
    """The dtype of exported weights: that of train.base, or bfloat16 for a new drafter."""
    return stored_dtype(cfg.train.base) if cfg.train.base else torch.bfloat16


def taken_tokens(tokenizer: Any) -> dict[int, str]:
    """Special tokens that already mean something: id -> pad, eos, bos, unk or template."""
    template = tokenizer.chat_template or ""
    special = tokenizer.added_tokens_decoder.items()
    taken = {index: "template" for index, token in special if str(token) in template}
    for role in ("unk", "bos", "eos", "pad"):
        index = getattr(tokenizer, f"{role}_token_id")
        if index is not None:
            taken[index] = role
    return taken


def mask_token(cfg: Config, vocab_size: int) -> int:
    """drafter.mask_token_id, or the highest special token that text and template never use.

    Raises ValueError when no such token exists. Pad or eos would be no substitute: their embedding
    already has a meaning.
    """
    if cfg.drafter.mask_token_id >= 0:
        return cfg.drafter.mask_token_id
    tokenizer = target_tokenizer(cfg)
    if tokenizer is None:
        raise ValueError(
            f"{cfg.target_path} has no tokenizer to choose a mask token from: set "
            "drafter.mask_token_id to an id that your traffic never contains"
        )
    taken = taken_tokens(tokenizer)
    free = [
        index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special and index not in taken and index < vocab_size
    ]
    if not free:
        raise ValueError(
            f"{cfg.target_path} has no unused special token: set drafter.mask_token_id to an id "
            "that your traffic never contains"
        )
    return max(free)
