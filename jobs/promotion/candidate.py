"""The drafter that may become champion: its folder, its evaluation, the tags of its version."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.checkpoint import compat_fields, compat_key, drafter_sha256, read_config
from dflash.identity import target_id
from jobs.base.config import Config
from jobs.evaluation.drafters import find_drafter
from jobs.registry.versions import (
    COMPAT,
    FIELDS,
    MAX_TAG,
    SHA256,
)
from store.place import read_json

JUDGED = ("tau", "tau_by_k", "baseline", "regression")
"""What the gate compares of an evaluation."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter folder, and the evaluation of exactly its present files."""

    folder: Path
    sha256: str
    compat: dict[str, Any]
    key: str
    evaluation: dict[str, Any]


def read_candidate(cfg: Config) -> Candidate:
    """`promote.drafter` (default: the newest), its compat fields with today's target, and its
    evaluation. Raises ValueError for a folder that was not evaluated, or has changed since.
    """
    folder = find_drafter(cfg, cfg.promote.drafter)
    shape, identity = read_config(folder), target_id(cfg.target_path)
    sha256 = drafter_sha256(folder)
    place, name, again = (
        cfg.place("evaluations"),
        f"{folder.name}.json",
        f"run `flywheel evaluate {folder}`",
    )
    evaluation = read_json(
        place, name, ["drafter_sha256", "target_id", "tau", "tau_by_k", "leaking"], again
    )
    if evaluation is None:
        raise ValueError(f"{folder} was not evaluated: {again}")
    try:  # no comparison is true of a NaN, so it would be below no limit
        json.dumps([evaluation.get(name) for name in JUDGED], allow_nan=False)
    except ValueError as error:
        raise ValueError(f"{place}/{name} is damaged ({error}): {again}") from error
    if evaluation["drafter_sha256"] != sha256:
        raise ValueError(
            f"{folder} has changed since {place}/{name} was written ({sha256[:12]}, evaluated "
            f"{evaluation['drafter_sha256'][:12]}): {again}"
        )
    fields = json.loads(json.dumps(compat_fields(shape, identity)))
    return Candidate(folder, sha256, fields, compat_key(shape, identity), evaluation)


def evidence(candidate: Candidate) -> dict[str, Any]:
    """The part of the evaluation that goes into the record of a decision."""
    kept = ("drafter", "drafter_sha256", "target_id", "compat_key", "samples", "rounds", "k", "tau")
    return {name: candidate.evaluation[name] for name in (*kept, "baseline", "leaking")}


def tags(candidate: Candidate) -> dict[str, str]:
    """The tags of the candidate's version; all values are text."""
    evaluation, tau = candidate.evaluation, candidate.evaluation["tau"]
    return {
        SHA256: candidate.sha256,
        COMPAT: candidate.key,
        FIELDS: json.dumps(candidate.compat),
        "target.id": candidate.compat["target_id"],
        "drafter.name": candidate.folder.name,
        "eval.tau": f"{tau['pooled']:.6f}",
        "eval.tau.ci": json.dumps(tau["ci"]),
        "eval.tau.domains": _domains(tau["domains"]),
        "eval.samples": str(evaluation["samples"]),
        "eval.k": str(evaluation["k"]),
        "eval.baseline": (evaluation["baseline"] or {}).get("drafter_sha256", ""),
    }


def _domains(taus: dict[str, float]) -> str:
    """Tau of every domain as JSON. If that is too long for a tag, the number of domains and the
    range of tau; the record of the decision has all of them.
    """
    text = json.dumps(taus)
    if len(text) > MAX_TAG:
        text = json.dumps(
            {"domains": len(taus), "lowest": min(taus.values()), "highest": max(taus.values())}
        )
    return text
