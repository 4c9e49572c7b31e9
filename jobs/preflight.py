"""flywheel preflight [FOLDER]

Prove a drafter on the engine that will serve it, before promotion: its folder keeps the contract,
vLLM drafts what our forward drafts on the same tokens, served acceptance is replayed acceptance. A
row per check says what was found and what to do; where something differs, the likely cause is
named. Kept in <work>/preflight; exits 1 if a check fails.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash.checkpoint import drafter_sha256
from dflash.target_model import target_id
from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import print_finding, print_table
from jobs.base.target_facts import compute_dtype
from jobs.doctor import Check
from jobs.evaluate import find_drafter, save_json
from jobs.proof.engine_trial import trial
from jobs.proof.folder_checks import contract
from jobs.proof.measurements import RULE
from jobs.reporting.page import publish
from jobs.serve import dtype_name, vllm_version
from store.files import read_json
from store.ids import short_hash

SHOWN_TIES = 10


def run(cfg: Config) -> dict[str, Any]:
    """Check `preflight.drafter` (default: the newest); a pass under the same settings is reused.

    Raises ValueError for a folder without weights, or without held-out samples to serve.
    """
    folder = find_drafter(cfg, cfg.preflight.drafter)
    path = result_path(cfg, folder)
    if passed(cfg, folder):
        return read_json(path, ["ok"]) | {"reused": True}
    checks, measured = contract(cfg, folder), {}
    if any(check.status == "fail" for check in checks):
        checks.append(Check("engine", "not started", "skip", "mend the folder first"))
    else:
        more, measured = trial(cfg, folder)
        checks += more
    result = {
        "stage": "preflight",
        "ok": all(check.status != "fail" for check in checks),
        "drafter": folder.name,
        "drafter_sha256": drafter_sha256(folder),
        "target_id": target_id(cfg.target_path),
        "vllm": vllm_version(),
        "checks": [asdict(check) for check in checks],
        **measured,
    }
    show(folder, checks, measured)
    result = save_json(path, result)
    publish(cfg, result["drafter_sha256"])
    return result | {"reused": False}


def result_path(cfg: Config, folder: Path) -> Path:
    """Where the result stands for these bytes, this target, these serving settings, this vLLM."""
    serve = asdict(cfg.serve)
    for name in ("host", "port", "drafter", "capture"):  # nothing that a draft depends on
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
    return cfg.path("preflight", f"{key}.json")


def passed(cfg: Config, folder: Path) -> bool:
    """Whether this drafter has passed under these settings."""
    path = result_path(cfg, folder)
    return path.is_file() and read_json(path, ["ok"])["ok"]


def show(folder: Path, checks: list[Check], measured: dict[str, Any]) -> None:
    """The table, what to do about each row that is not fine, and the near ties."""
    print_table(
        f"Preflight of {folder.name}",
        ["", "check", "found"],
        [[c.status, c.name, c.found] for c in checks],
    )
    for check in checks:
        if check.fix:
            print_finding(check.status, check.name, check.fix)
    ties = measured.get("near_ties", [])
    if ties:
        columns = ["trace", "anchor", "slot", "ours", "theirs", "gap"]
        rows = [[tie[name] for name in columns] for tie in ties[:SHOWN_TIES]]
        print_table(f"Near ties ({len(ties)}; gap in our logits)", columns, rows)


if __name__ == "__main__":
    run_as_module("preflight")
