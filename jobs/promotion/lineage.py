"""Where a drafter comes from, as tags of its version: data, base drafter, code, evidence."""

import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

from jobs.base.config import Config
from jobs.promotion.candidate import Candidate
from jobs.proof.kept_results import preflight_verdict
from jobs.registry.versions import Registry
from jobs.tracking.mlflow_runs import origin

BASE = "train.base.sha256"
INPUTS = {
    "selection_version": "data.selection.version",
    "traffic_version": "data.traffic.version",
    "features": "data.features.key",
}
"""Inputs of a training run -> tags of its version."""


def lineage(cfg: Config, registry: Registry, candidate: Candidate) -> dict[str, str]:
    """Tags for the candidate's version. What is not known has none."""
    made = origin(registry.client, cfg, candidate.folder.name)
    tags = {tag: made[name] for name, tag in INPUTS.items() if made.get(name)}
    if base := made.get("base"):
        tags[BASE] = base
        parent = registry.find(base)
        if parent is not None:
            tags["train.base.version"] = parent.number
    place = cfg.place("evaluations", f"{candidate.folder.name}.json")
    tags["eval.file"] = str(place)
    report = cfg.place("reports")
    if report.has(f"{candidate.folder.name}.html"):
        tags["report"] = str(report / f"{candidate.folder.name}.html")
    tags["preflight"] = preflight_verdict(cfg, candidate.folder)
    return tags | code_version()


def code_version() -> dict[str, str]:
    """The version of this package, and its git commit if it runs from a repository."""
    tags = {"code.version": importlib.metadata.version("dflash-flywheel")}
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        command: list[Any] = ["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=40"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return tags
        if found.returncode == 0:
            tags["code.commit"] = found.stdout.strip()
    return tags
