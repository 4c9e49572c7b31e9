"""flywheel verify [FOLDER]

Prove a drafter (default: the champion) on a real server, in four parts:

- serve the target with it on the held-out prompts, replay the answers, and compare with the
  acceptance that vLLM counted,
- compare the greedy text with and without the drafter; a server without a drafter is the judge, and
  how it re-reads its own answers is the control,
- choose K from measured cost and replayed acceptance; `promote` reads the costs,
- measure the speed-up.

Results are kept in <work>/verified; exits 1 if a limit is exceeded.
"""

from pathlib import Path
from typing import Any

from dflash.acceptance import tau
from dflash.checkpoint import compat_fields, drafter_sha256, read_config
from dflash.identity import target_id
from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console
from jobs.base.devices import require_fit
from jobs.dataset.acceptance_rows import commit_served, stored_walks
from jobs.dataset.samples import load_rows
from jobs.dataset.slices import Row, Walks, pick, taus_by_slice
from jobs.evaluation.drafters import find_drafter
from jobs.proof.greedy_requests import servable
from jobs.proof.kept_results import costs_key, verify_result
from jobs.proof.measurements import measure
from jobs.proof.reference_check import check_reference
from jobs.proof.speed import speed_domain
from jobs.proof.verdict import chosen_k, compare_served, conclude
from jobs.proof.verify_table import show
from jobs.registry.versions import resolve
from jobs.reporting.page import publish
from jobs.servers.server_pool import MOST, Servers, require
from store.ids import drafter_version
from store.place import read_json, write_json


def run(cfg: Config) -> dict[str, Any]:
    """Verify `verify.drafter`; returns the measurements, kept ones if they passed.

    `ok` is false if a limit is exceeded; `faults` says which. Raises ValueError without a drafter
    or held-out samples, and if no server fits into memory.
    """
    version, folder = _drafter(cfg)
    shape = read_config(folder)
    held_out = load_rows(cfg, cfg.evaluate.split, taps=shape.target_layer_ids)
    speed_domain(cfg, held_out)  # without a round there is nothing to serve
    held_out = servable(cfg, held_out, max(cfg.serve.k or [shape.num_drafts]))
    sha = drafter_version(drafter_sha256(folder))
    rows, walks = stored_walks(cfg, sha, held_out)
    if len(rows) < len(held_out):
        console.print(f"{len(held_out) - len(rows)} samples were not evaluated and are left out")
    kept = verify_result(cfg, folder, rows)
    known = read_json(*kept, ["ok", "drafter_sha256", "speedup"])
    if known is not None and known["ok"]:
        return published(cfg, known) | {"reused": True}
    result = {
        "stage": "verify",
        "version": version,
        "drafter": folder.name,
        "drafter_sha256": drafter_sha256(folder),
        "target_id": target_id(cfg.target_path),
        "compat": compat_fields(shape, target_id(cfg.target_path)),
        "costs_key": costs_key(cfg),
        **prove(cfg, folder, f"v{version}" if version else folder.name, rows, walks),
    }
    show(result)
    return published(cfg, write_json(*kept, result)) | {"reused": False}


def _drafter(cfg: Config) -> tuple[str | None, Path]:
    """(version in the registry, folder) of the drafter to verify; no version for a named folder."""
    if cfg.verify.drafter:
        return None, find_drafter(cfg, cfg.verify.drafter)
    found = resolve(cfg, "champion")
    if found is None:
        raise ValueError("there is no champion to verify: name a folder, `flywheel verify FOLDER`")
    return found


def published(cfg: Config, result: dict[str, Any]) -> dict[str, Any]:
    """Write the drafter's page again, now with the served side; adds its path to the result."""
    return result | {"report": publish(cfg, result["drafter_sha256"])}


def prove(
    cfg: Config, folder: Path, name: str, rows: list[Row], walks: dict[int, Walks]
) -> dict[str, Any]:
    """Serve and measure, commit the served acceptance, replay and decode, and conclude."""
    domain = speed_domain(cfg, rows)
    taus = {k: tau(pick(rows, walk, domain)) for k, walk in walks.items()}
    have = require(cfg, folder, 1, "verify")
    require_fit(cfg, "verify")
    with Servers(cfg, folder, min(have.servers, MOST)) as servers:
        measured = measure(cfg, servers, rows, taus)
    commit_served(cfg, folder, rows, measured.answers, f"verify-{name}")
    compared = compare_served(cfg, folder, rows, measured.answers, measured.k)
    if not compared.rounds:
        raise ValueError(f"{compared.unchecked}: hold out longer answers, or set evaluate.split")
    # After the servers have stopped: torch keeps GPU memory that it once allocated.
    reference = check_reference(cfg, folder, rows)
    return {
        **conclude(rows, measured, compared, reference),
        **chosen_k(measured, taus, taus_by_slice(rows, walks)),
        "speed_domain": domain,
        "tau_recorded": tau(walks[measured.k]),
        "servers_at_once": servers.most,
    }


if __name__ == "__main__":
    run_as_module("verify")
