"""flywheel preflight [FOLDER]

Prove a drafter on the engine that will serve it, before promotion: its folder is what vLLM expects,
vLLM drafts what our forward drafts on the same tokens, and served acceptance equals replayed
acceptance. One row per check says what was found and what to do. Where something differs, the
likely cause is named. The result is kept in <work>/preflight; exits 1 if a check fails.
"""

from dataclasses import asdict
from typing import Any

from dflash.checkpoint import drafter_sha256
from dflash.identity import target_id
from jobs.base.checks import Check, none_fails, print_checks
from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import print_table
from jobs.base.packages import vllm_version
from jobs.evaluation.drafters import find_drafter
from jobs.proof.folder_checks import check_folder
from jobs.proof.kept_results import preflight_result
from jobs.proof.preflight_run import try_on_engine
from jobs.reporting.page import publish
from store.place import read_json, write_json

SHOWN_TIES = 10


def run(cfg: Config) -> dict[str, Any]:
    """Check `preflight.drafter` (default: the newest). A pass under the same settings is reused.

    Raises ValueError for a folder without weights, or without held-out samples to serve.
    """
    folder = find_drafter(cfg, cfg.preflight.drafter)
    kept = preflight_result(cfg, folder)
    known = read_json(*kept, ["ok"])
    if known is not None and known["ok"]:
        return known | {"reused": True}
    checks, measured = check_folder(cfg, folder), {}
    if not none_fails(checks):
        checks.append(Check("engine", "not started", "skip", "repair the folder first"))
    else:
        more, measured = try_on_engine(cfg, folder)
        checks += more
    result = {
        "stage": "preflight",
        "ok": none_fails(checks),
        "drafter": folder.name,
        "drafter_sha256": drafter_sha256(folder),
        "target_id": target_id(cfg.target_path),
        "vllm": vllm_version(),
        "checks": [asdict(check) for check in checks],
        **measured,
    }
    print_checks(f"Preflight of {folder.name}", checks)
    if ties := measured.get("near_ties"):
        show_near_ties(ties)
    result = write_json(*kept, result)
    publish(cfg, result["drafter_sha256"])
    return result | {"reused": False}


def show_near_ties(ties: list[dict[str, Any]]) -> None:
    """Print the drafts that differ by rounding alone: two correct computations can do that."""
    columns = ["trace", "anchor", "slot", "ours", "theirs", "gap"]
    rows = [[tie[name] for name in columns] for tie in ties[:SHOWN_TIES]]
    print_table(f"Near ties ({len(ties)}; gap in our logits)", columns, rows)


if __name__ == "__main__":
    run_as_module("preflight")
