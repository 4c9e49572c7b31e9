"""Where results are kept, and under which settings they still hold."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash.checkpoint import drafter_sha256
from dflash.identity import target_id
from jobs.base.config import Config
from jobs.base.devices import compute_dtype, dtype_name
from jobs.base.packages import vllm_version
from jobs.proof.choose_k import CHOICE
from jobs.proof.draft_methods import Method
from store.ids import short_hash
from store.place import Place, read_json

RULE = "served text, plain answers read again"
"""How drafters are judged. It is part of the key of kept results: a new rule measures again."""


Kept = tuple[Place, str]
"""The place and name of a result."""


def methods_result(cfg: Config, methods: Sequence[Method], rows: Sequence[dict[str, Any]]) -> Kept:
    """Where the result is kept for these methods, prompts, settings and this vLLM."""
    settings = [asdict(cfg.verify), asdict(cfg.serve), dtype_name(cfg), target_id(cfg.target_path)]
    tried = [[m.name, m.settings, m.files, m.missing] for m in methods]
    key = short_hash([tried, [row["sample_id"] for row in rows], settings, vllm_version(), RULE])
    return cfg.place("methods"), f"{key}.json"


def preflight_result(cfg: Config, folder: Path) -> Kept:
    """Where the result is kept for these files, this target, these serving settings, this vLLM."""
    serve = asdict(cfg.serve)
    for name in ("host", "port", "drafter", "capture"):  # drafts do not depend on these
        del serve[name]
    key = short_hash(
        [
            drafter_sha256(folder),
            target_id(cfg.target_path),
            [dtype_name(cfg), str(compute_dtype(cfg)), serve, RULE],
            [cfg.preflight.requests, cfg.evaluate.split],
            vllm_version(),
        ]
    )
    return cfg.place("preflight"), f"{key}.json"


def preflight_passed(cfg: Config, folder: Path) -> bool:
    """Whether this drafter has passed a preflight under these settings."""
    found = read_json(*preflight_result(cfg, folder), ["ok"])
    return found is not None and found["ok"]


def verify_result(cfg: Config, folder: Path, rows: Sequence[dict[str, Any]]) -> Kept:
    """Where the result is kept for this drafter, these prompts, these settings, this vLLM."""
    settings = [asdict(cfg.verify), asdict(cfg.serve), dtype_name(cfg), str(compute_dtype(cfg))]
    settings += [target_id(cfg.target_path), vllm_version(), CHOICE, RULE]
    key = short_hash([drafter_sha256(folder), [row["sample_id"] for row in rows], settings])
    return cfg.place("verified"), f"{key}.json"
