"""The drafter's shape, derived once from the target's config and the `drafter` section."""

import json
from typing import Any

import torch

from dflash.checkpoint import stored_dtype
from dflash.config import DrafterConfig, check_taps, default_taps
from dflash.identity import legacy_target_id
from dflash.target import resolve_dtype, target_id
from jobs.config import Config
from store.traffic import read_traffic


def target_config(cfg: Config) -> dict[str, Any]:
    """The target's config.json. Raises ValueError if there is none."""
    path = cfg.target_path / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing: set target.path, or run `flywheel target`")
    return json.loads(path.read_text())


def none_of_target(cfg: Config, what: str, fix: str) -> ValueError:
    """The error of a stage that finds no `what` ("test sample", say) of this target in traffic/.

    Rows that an earlier version named by this folder's former identity are said to be just that.
    """
    identity, folder = target_id(cfg.target_path), cfg.path("traffic")
    former = legacy_target_id(cfg.target_path)
    if not read_traffic(folder, identity).num_rows and read_traffic(folder, former).num_rows:
        fix = (
            f"its samples were made under this folder's former id {former}, which did not cover "
            "all bytes of the weights: run `flywheel ingest` again, on the logs they came from"
        )
    return ValueError(f"{folder} has no {what} of target {identity}: {fix}")


def compute_device(cfg: Config) -> str:
    """Where this process computes: cpu or cuda. ValueError for target.device=cuda without one."""
    if cfg.target.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("target.device=cuda, but torch sees no GPU: set target.device=cpu")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    return found if cfg.target.device == "auto" else cfg.target.device


def compute_dtype(cfg: Config) -> torch.dtype:
    """target.dtype, auto resolved for `compute_device`."""
    return resolve_dtype(cfg.target.dtype, compute_device(cfg))


def target_taps(cfg: Config) -> tuple[int, ...]:
    """Explicit drafter.taps, else evenly spaced ones. Raises ValueError if they do not fit."""
    num_layers = target_config(cfg)["num_hidden_layers"]
    if cfg.drafter.taps:
        taps = tuple(cfg.drafter.taps)
        check_taps(taps, num_layers)
        return taps
    return default_taps(num_layers, cfg.drafter.num_taps)


def target_fields(cfg: Config) -> dict[str, Any]:
    """Fields of DrafterConfig in which every drafter of this target and these features agrees."""
    target = target_config(cfg)
    return {
        "hidden_size": target["hidden_size"],
        "vocab_size": target["vocab_size"],
        "num_target_layers": target["num_hidden_layers"],
        "target_layer_ids": target_taps(cfg),
    }


def drafter_config(cfg: Config) -> DrafterConfig:
    """A new drafter: the target's widths, plain RoPE of the target's base, our depth and block."""
    target = target_config(cfg)
    rope = target.get("rope_parameters") or target
    heads, reduced = target["num_attention_heads"], cfg.drafter.draft_vocab
    return DrafterConfig(
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


def export_dtype(cfg: Config) -> torch.dtype:
    """In which weights are exported: that of train.base, bfloat16 for a new drafter."""
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

    Raises ValueError when no such token exists: falling back to pad or eos would make the mask
    mean something else to the target's embedding.
    """
    if cfg.drafter.mask_token_id >= 0:
        return cfg.drafter.mask_token_id
    from transformers import AutoTokenizer  # as in dflash/target.py

    tokenizer = AutoTokenizer.from_pretrained(cfg.target_path, local_files_only=True)
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


def end_tokens(cfg: Config) -> list[int]:
    """The target's end-of-text ids."""
    end = target_config(cfg)["eos_token_id"]
    return [int(i) for i in (end if isinstance(end, list) else [end])]
