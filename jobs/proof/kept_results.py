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
from jobs.proof.choose_k import CHOICE, Cost
from jobs.proof.draft_methods import Method
from store.ids import short_hash
from store.place import Place, newest_json, read_json

RULE = "served text, plain answers read again"
"""How drafters are judged. It is part of the key of kept results: a new rule measures again."""


Kept = tuple[Place, str]
"""The place and name of a result."""


def methods_result(cfg: Config, methods: Sequence[Method], rows: Sequence[dict[str, Any]]) -> Kept:
    """Where the result is kept for these methods, prompts, settings and this vLLM."""
    verify = asdict(cfg.verify)
    del verify["drafter"]
    settings = [verify, asdict(cfg.serve), dtype_name(cfg), target_id(cfg.target_path)]
    tried = [[m.name, m.settings, m.files, m.missing] for m in methods]
    key = short_hash([tried, [row["sample_id"] for row in rows], settings, vllm_version(), RULE])
    return cfg.place("methods"), f"{key}.json"


def preflight_result(cfg: Config, folder: Path) -> Kept:
    """Where the result is kept for these files, this target, these serving settings, this vLLM."""
    serve = asdict(cfg.serve)
    for name in (
        "host",
        "port",
        "drafter",
        "capture",
        "token_file",
    ):  # drafts do not depend on these
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


def preflight_verdict(cfg: Config, folder: Path) -> str:
    """Whether this drafter has "passed" or "failed" a preflight under these settings, or "none"."""
    found = read_json(*preflight_result(cfg, folder), ["ok"])
    return "none" if found is None else "passed" if found["ok"] else "failed"


def verify_result(cfg: Config, folder: Path, rows: Sequence[dict[str, Any]]) -> Kept:
    """Where the result is kept for this drafter, these prompts, these settings, this vLLM."""
    verify = asdict(cfg.verify)
    del verify["drafter"]  # its hash is in the key
    settings = [verify, asdict(cfg.serve), dtype_name(cfg), str(compute_dtype(cfg))]
    settings += [target_id(cfg.target_path), vllm_version(), CHOICE, RULE]
    key = short_hash([drafter_sha256(folder), [row["sample_id"] for row in rows], settings])
    return cfg.place("verified"), f"{key}.json"


def verify_faults(cfg: Config, sha256: str) -> list[str]:
    """What the latest `verify` of this drafter found wrong; [] if it passed or never ran."""
    wanted = {"drafter_sha256": sha256, "target_id": target_id(cfg.target_path)}
    for found in newest_json(cfg.place("verified"), list(wanted)):
        if wanted.items() <= found.items():
            return found.get("faults", [])
    return []


def costs_key(cfg: Config) -> str:
    """What the costs of a round depend on beside the drafter's shape: target, dtype, settings of
    the server, vLLM.
    """
    serve = asdict(cfg.serve)
    for name in ("host", "port", "drafter", "capture", "token_file", "k"):
        del serve[name]
    settings = [serve, dtype_name(cfg), target_id(cfg.target_path), vllm_version(), CHOICE]
    return short_hash(settings)


def known_costs(
    cfg: Config, sha256: str, compat: dict[str, Any]
) -> tuple[list[Cost], dict[str, Any] | None]:
    """The costs of a round with a drafter, and the result of `verify` that has them: the latest of
    this drafter, else the latest of one with the same shape, since weights do not change costs.
    Without any: ([], None).
    """
    keys = ["drafter_sha256", "target_id"]
    key, alike = costs_key(cfg), None
    for found in newest_json(cfg.place("verified"), keys):
        if not found.get("ok") or not found.get("costs") or found.get("costs_key") != key:
            continue
        if found["drafter_sha256"] == sha256:
            alike = found
            break
        if alike is None and found["compat"] == compat:
            alike = found
    return [Cost(**one) for one in alike["costs"]] if alike else [], alike
