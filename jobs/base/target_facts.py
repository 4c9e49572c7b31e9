"""What follows from the target's folder: its config, taps, tokenizer and end-of-text ids."""

import json
from pathlib import Path
from typing import Any

from dflash.drafter_config import check_taps, default_taps
from dflash.target_model import read_target_config
from jobs.base.config import Config

TOKENIZERS = ("tokenizer*", "vocab.*", "*.tiktoken", "tekken.json")


def target_config(cfg: Config) -> dict[str, Any]:
    """The target's config.json. Raises ValueError as dflash.target_model.read_target_config."""
    return read_target_config(cfg.target_path)


def target_taps(cfg: Config) -> tuple[int, ...]:
    """Explicit drafter.taps, else evenly spaced ones. Raises ValueError if they do not fit."""
    num_layers = target_config(cfg)["num_hidden_layers"]
    if cfg.drafter.taps:
        taps = tuple(cfg.drafter.taps)
        check_taps(taps, num_layers)
        return taps
    if cfg.drafter.num_taps > max(1, num_layers - 3):
        raise ValueError(
            f"drafter.num_taps = {cfg.drafter.num_taps}: a target of {num_layers} layers has at "
            f"most {max(1, num_layers - 3)} evenly spread ones; lower it, or set drafter.taps"
        )
    return default_taps(num_layers, cfg.drafter.num_taps)


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
    """The token ids that end a text, ascending: the union of those in config.json, in
    generation_config.json and of the tokenizer.

    vLLM 0.32 stops at the tokenizer's id and at those of generation_config.json; without that file
    it reads config.json. Raises ValueError if none of them names an id, and for an id that is not a
    number.
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
