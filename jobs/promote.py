"""flywheel promote [FOLDER]

Make an evaluated drafter the champion: gate -> lease -> champion unchanged since the evaluation? ->
`previous`, then `champion`, then a record in <work>/promotions. A drafter that is refused is a
version with the alias `challenger` and a record that says why; the command then exits 1.
"""

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.checkpoint import compat_fields, compat_key, drafter_sha256, read_config
from dflash.target_model import target_id
from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.base.target_facts import target_config
from jobs.promotion import gate
from jobs.registry.versions import (
    CHALLENGER,
    CHAMPION,
    COMPAT,
    FIELDS,
    MAX_TAG,
    PREVIOUS,
    SHA256,
    Registry,
    Version,
    lease,
    resolve,
    who,
)
from store import promotions
from store.files import read_json
from store.ids import drafter_version

__all__ = ["resolve", "run"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter folder with the evaluation of exactly what is in it."""

    folder: Path
    sha256: str
    compat: dict[str, Any]
    key: str
    evaluation: dict[str, Any]


def run(cfg: Config) -> dict[str, Any]:
    """Promote `promote.drafter` (default: the newest) if the gate passes; returns the decision.

    Raises ValueError for a folder that is no drafter, was not evaluated or has changed since, and
    when another promotion holds the lease.
    """
    candidate = read_candidate(cfg)
    with lease(cfg):
        registry = Registry(cfg)
        champion = registry.current(CHAMPION)
        complete_history(cfg, champion)
        return _decide(cfg, registry, candidate, champion)


def read_candidate(cfg: Config) -> Candidate:
    """The drafter to judge, its compat fields with today's target, and its evaluation."""
    from jobs.evaluate import find_drafter  # evaluate itself asks for the champion

    folder = find_drafter(cfg, cfg.promote.drafter)
    shape, identity, sha256 = (
        read_config(folder),
        target_id(cfg.target_path),
        drafter_sha256(folder),
    )
    path = cfg.path("evaluations", f"{folder.name}.json")
    if not path.is_file():
        raise ValueError(f"{folder} was not evaluated: run `flywheel evaluate {folder}`")
    again = f"run `flywheel evaluate {folder}`"
    evaluation = read_json(path, ["drafter_sha256", "target_id", "tau", "leaking"], again)
    if evaluation["drafter_sha256"] != sha256:
        raise ValueError(
            f"{folder} has changed since {path} was written ({sha256[:12]}, evaluated "
            f"{evaluation['drafter_sha256'][:12]}): {again}"
        )
    fields = json.loads(json.dumps(compat_fields(shape, identity)))
    return Candidate(folder, sha256, fields, compat_key(shape, identity), evaluation)


def _decide(
    cfg: Config, registry: Registry, candidate: Candidate, champion: Version | None
) -> dict[str, Any]:
    foreign = _foreign(cfg, candidate)
    if foreign:
        return _refuse(cfg, candidate, champion, None, foreign)
    version = registry.register(candidate.folder, _tags(candidate))
    if champion is not None and champion.number == version.number:
        registry.drop_alias(CHALLENGER, version)
        return _report("unchanged", candidate, champion, version, [])
    registry.set_alias(CHALLENGER, version)
    reasons = gate.stale(candidate.evaluation, champion)
    if cfg.promote.require_preflight:
        reasons += _not_proven(cfg, candidate)
    if version.bad:
        reasons.append(f"version {version.number} was rolled back: {version.bad}")
    if not reasons:
        reasons = gate.refusals(cfg.promote, candidate.evaluation, champion)
        if champion is not None and not cfg.promote.new_shape:
            # A champion of an older version has no word on options that were off for all.
            known = dict.fromkeys(candidate.compat, 0) | champion.compat
            shape = gate.mismatches(candidate.compat, known, "the champion")
            reasons += [f"{fault} (promote.new_shape=true allows it)" for fault in shape]
    if reasons:
        return _refuse(cfg, candidate, champion, version, reasons)
    move(cfg, registry, "promote", champion, version, "gate passed", _evidence(candidate))
    registry.drop_alias(CHALLENGER, version)
    return _report("promoted", candidate, champion, version, [])


def _foreign(cfg: Config, candidate: Candidate) -> list[str]:
    """Why a drafter is not for this target, field by field: no limit or switch changes that."""
    target = target_config(cfg)
    ours = {
        "target_id": candidate.compat["target_id"],
        "hidden_size": target["hidden_size"],
        "vocab_size": target["vocab_size"],
        "num_target_layers": target["num_hidden_layers"],
    }
    drafter = candidate.compat | {"target_id": candidate.evaluation["target_id"]}
    return gate.mismatches(drafter, ours, "the target")


def _not_proven(cfg: Config, candidate: Candidate) -> list[str]:
    """Why the engine that will serve is not known to draft what we replay."""
    from jobs.preflight import passed  # it needs what serving needs

    if passed(cfg, candidate.folder):
        return []
    return [
        "no passed preflight under these settings (promote.require_preflight): run "
        f"`flywheel preflight {candidate.folder}`"
    ]


def move(
    cfg: Config,
    registry: Registry,
    action: str,
    champion: Version | None,
    version: Version,
    reason: str,
    evidence: Any,
) -> None:
    """The one way a champion changes (needs the lease): previous, champion, record. Interrupted
    before the record, the next promotion or rollback writes it (`complete_history`).
    """
    if champion is not None:
        registry.set_alias(PREVIOUS, champion)
    registry.set_alias(CHAMPION, version)
    _record(cfg, action, champion, version.number, version.sha256, reason, evidence)


def complete_history(cfg: Config, champion: Version | None) -> None:
    """Record a champion that the records do not know (needs the lease)."""
    moves = [r for r in promotions.read(cfg.path("promotions")) if r["action"] != "refuse"]
    known = moves[-1]["to_version"] if moves else None
    if champion is None or champion.number == known:
        return
    reason = "the alias had moved without a record: an interrupted promotion, or set by hand"
    record = {
        "action": "promote",
        "who": who(),
        "model": cfg.mlflow.model,
        "from_version": known,
        "from_drafter": moves[-1]["to_drafter"] if moves else None,
        "to_version": champion.number,
        "to_drafter": drafter_version(champion.sha256),
        "reason": reason,
        "evidence": None,
    }
    promotions.append(cfg.path("promotions"), record)
    console.print(f"note: champion {champion.number}: {reason}; recorded now")


def _record(
    cfg: Config,
    action: str,
    champion: Version | None,
    number: str | None,
    sha256: str,
    reason: str,
    evidence: Any,
) -> None:
    record = {
        "action": action,
        "who": who(),
        "model": cfg.mlflow.model,
        "from_version": champion.number if champion else None,
        "from_drafter": drafter_version(champion.sha256) if champion else None,
        "to_version": number,
        "to_drafter": drafter_version(sha256),
        "reason": reason,
        "evidence": evidence,
    }
    promotions.append(cfg.path("promotions"), record)


def _refuse(
    cfg: Config,
    candidate: Candidate,
    champion: Version | None,
    version: Version | None,
    reasons: list[str],
) -> dict[str, Any]:
    number = version.number if version else None
    text = "; ".join(reasons)
    _record(cfg, "refuse", champion, number, candidate.sha256, text, _evidence(candidate))
    return _report("refused", candidate, champion, version, reasons)


def _evidence(candidate: Candidate) -> dict[str, Any]:
    kept = ("drafter", "drafter_sha256", "compat_key", "samples", "rounds", "k", "tau", "baseline")
    return {name: candidate.evaluation[name] for name in (*kept, "leaking")}


def _tags(candidate: Candidate) -> dict[str, str]:
    """What a version must say about itself (all tags are text)."""
    evaluation, tau = candidate.evaluation, candidate.evaluation["tau"]
    return {
        SHA256: candidate.sha256,
        COMPAT: candidate.key,
        FIELDS: json.dumps(candidate.compat),
        "target.id": candidate.compat["target_id"],
        "drafter.name": candidate.folder.name,
        "code.version": importlib.metadata.version("dflash-flywheel"),
        "eval.tau": f"{tau['pooled']:.6f}",
        "eval.tau.ci": json.dumps(tau["ci"]),
        "eval.tau.domains": _domains(tau["domains"]),
        "eval.samples": str(evaluation["samples"]),
        "eval.k": str(evaluation["k"]),
        "eval.baseline": (evaluation["baseline"] or {}).get("drafter_sha256", ""),
    }


def _domains(taus: dict[str, float]) -> str:
    """Tau of every domain as JSON, or, of more than a tag holds, their number and range; the
    record of the decision has them all.
    """
    text = json.dumps(taus)
    if len(text) > MAX_TAG:
        text = json.dumps(
            {"domains": len(taus), "lowest": min(taus.values()), "highest": max(taus.values())}
        )
    return text


def _report(
    decision: str,
    candidate: Candidate,
    champion: Version | None,
    version: Version | None,
    reasons: list[str],
) -> dict[str, Any]:
    number = version.number if version else None
    before = champion.number if champion else None
    console.print(
        f"{decision}: drafter {candidate.folder.name} (version {number or 'none'}), "
        f"champion before: {before or 'none'}"
    )
    if reasons:
        print_table("Refused because", ["reason"], [[reason] for reason in reasons])
    return {
        "stage": "promote",
        "ok": decision != "refused",
        "decision": decision,
        "version": number,
        "previous": before,
        "drafter": str(candidate.folder),
        "drafter_sha256": candidate.sha256,
        "compat_key": candidate.key,
        "tau": candidate.evaluation["tau"]["pooled"],
        "reasons": reasons,
    }


if __name__ == "__main__":
    run_as_module("promote")
