"""flywheel promote [FOLDER]

Make an evaluated drafter the champion. Under a lease: compare it with the present champion (the
gate), move the aliases `previous` and `champion`, and write a record to <work>/promotions. A
refused drafter for this target is registered as `challenger`; its record says why it was refused,
and the command exits 1.
"""

from typing import Any

from dflash.identity import legacy_target_id
from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.base.target_facts import target_config
from jobs.promotion import gate
from jobs.promotion.candidate import Candidate, evidence, read_candidate, tags
from jobs.promotion.champion_moves import Moves, promoting
from jobs.proof.kept_results import preflight_passed
from jobs.registry.versions import CHALLENGER, CHAMPION, Version


def run(cfg: Config) -> dict[str, Any]:
    """Promote `promote.drafter` (default: the newest) if the gate passes; returns the decision.

    Raises ValueError for a folder that is not a drafter, was not evaluated or has changed since its
    evaluation, and when another promotion holds the lease.
    """
    candidate = read_candidate(cfg)
    if not cfg.place().is_local and not cfg.mlflow.uri:
        console.print(
            f"note: {cfg.place()} can be used by several hosts, but the registry is a file of this "
            "one: set mlflow.uri to a server that all of them reach"
        )
    with promoting(cfg) as moves:
        champion = moves.registry.current(CHAMPION)
        moves.complete_history(champion)
        return _decide(cfg, moves, candidate, champion)


def _decide(
    cfg: Config, moves: Moves, candidate: Candidate, champion: Version | None
) -> dict[str, Any]:
    foreign = _foreign(cfg, candidate)
    if foreign:
        return _refuse(moves, candidate, champion, None, foreign)
    registry = moves.registry
    version = registry.register(candidate.folder, tags(candidate))
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
            # An older release of this package did not record some options; it had them off (0).
            known = dict.fromkeys(candidate.compat, 0) | champion.compat
            # The former id did not cover all bytes of the target. But the evaluation replayed this
            # very champion, on the target that it names.
            if known["target_id"] == legacy_target_id(cfg.target_path):
                known["target_id"] = candidate.evaluation["target_id"]
            shape = gate.mismatches(candidate.compat, known, "the champion")
            reasons += [f"{fault} (promote.new_shape=true allows it)" for fault in shape]
    if reasons:
        return _refuse(moves, candidate, champion, version, reasons)
    moves.move("promote", champion, version, "gate passed", evidence(candidate))
    registry.drop_alias(CHALLENGER, version)
    return _report("promoted", candidate, champion, version, [])


def _foreign(cfg: Config, candidate: Candidate) -> list[str]:
    """Why a drafter is not for this target, field by field. No setting can allow such a drafter."""
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
    """Why it is not proven that the serving engine drafts what replay does; empty if it is."""
    if preflight_passed(cfg, candidate.folder):
        return []
    return [
        "no passed preflight under these settings (promote.require_preflight): run "
        f"`flywheel preflight {candidate.folder}`"
    ]


def _refuse(
    moves: Moves,
    candidate: Candidate,
    champion: Version | None,
    version: Version | None,
    reasons: list[str],
) -> dict[str, Any]:
    number = version.number if version else None
    text = "; ".join(reasons)
    moves.record("refuse", champion, number, candidate.sha256, text, evidence(candidate))
    return _report("refused", candidate, champion, version, reasons)


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
