"""The drafter's shape, derived once from the target's config and the `drafter` section."""

import json
from pathlib import Path
from typing import Any

import torch

from dflash.checkpoint import stored_dtype
from dflash.drafter_config import DrafterConfig, check_taps, default_taps
from dflash.identity import legacy_target_id
from dflash.target_model import read_target_config, resolve_dtype, target_id
from jobs.base.config import Config
from serving.server_memory import GIB, free_bytes, weight_bytes
from store.traffic_table import read_traffic

TOKENIZERS = ("tokenizer*", "vocab.*", "*.tiktoken", "tekken.json")


def target_config(cfg: Config) -> dict[str, Any]:
    """The target's config.json. ValueErrors of dflash.target_model.read_target_config."""
    return read_target_config(cfg.target_path)


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


def unfit(cfg: Config, dtype: torch.dtype) -> str:
    """Why the target in this dtype does not fit into what is free here now; empty if it does."""
    needed = weight_bytes(cfg.target_path, dtype.itemsize)
    on_gpu = compute_device(cfg) == "cuda"
    free = torch.cuda.mem_get_info()[0] if on_gpu else free_bytes()
    if needed < free:
        return ""
    return (
        f"the target takes {needed / GIB:.1f} GiB in {str(dtype).removeprefix('torch.')}, "
        f"{free / GIB:.1f} GiB are free on the {'GPU' if on_gpu else 'CPU'}"
    )


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


def target_tokenizer(cfg: Config) -> Any | None:
    """The target's tokenizer; None if its folder has none. ValueError if it cannot be read."""
    from transformers import AutoTokenizer  # as in dflash/target_model.py

    folder = cfg.target_path
    if not any(path for name in TOKENIZERS for path in folder.glob(name)):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ValueError(f"{folder}: its tokenizer cannot be read: {error}") from error


def end_tokens(cfg: Config) -> list[int]:
    """The ids that end a text, ascending: the union of what config.json, generation_config.json and
    the tokenizer name.

    vLLM 0.32 ends at the tokenizer's and at those of generation_config.json, and reads config.json
    where that is absent. Raises ValueError if none names one, and for an id that is no number.
    """
    folder, found = cfg.target_path, set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            found |= _ends(folder / name)
    tokenizer = target_tokenizer(cfg)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    if not found:
        raise ValueError(
            f"{folder} names no end of text: write eos_token_id into its generation_config.json"
        )
    return sorted(found)


def _ends(path: Path) -> set[int]:
    """eos_token_id of a file: a number, a list of them, or nothing."""
    try:
        value = json.loads(path.read_bytes()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): fetch it again") from error
    ids = value if isinstance(value, list) else [] if value is None else [value]
    wrong = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or i < 0]
    if wrong:
        raise ValueError(f"{path}: eos_token_id {wrong[0]!r} is no token id")
    return set(ids)
