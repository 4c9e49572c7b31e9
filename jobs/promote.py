"""flywheel promote [--plan] [FOLDER] [promote.gate=FILE]

Make an evaluated drafter the champion. Under a lease: compare it with the present champion by the
rules of the gate, move the aliases `previous` and `champion`, and write a record to
<work>/promotions. A drafter for this target that is refused, or held since there is too little
data, is registered as `challenger`; its record says why, and the command exits 1. With --plan
(--dry-run) it prints every rule with its evidence and changes nothing.
"""

import json
from typing import Any

from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.promotion import gate
from jobs.promotion.candidate import Candidate, evidence, read_candidate, tags
from jobs.promotion.champion_moves import Moves, promoting
from jobs.promotion.decision import Decision, decide
from jobs.promotion.gate_rules import Rules, read_rules
from jobs.promotion.lineage import lineage
from jobs.registry.versions import CHALLENGER, CHAMPION, K, Version, opened

WORDS = {"pass": "promoted", "hold": "held", "refuse": "refused"}


def plan(cfg: Config) -> dict[str, Any]:
    """What `run` would decide, with the evidence of every rule; writes nothing."""
    rules, candidate, registry = read_rules(cfg.promote.gate), read_candidate(cfg), opened(cfg)
    champion = registry.current(CHAMPION) if registry else None
    known = registry.known(candidate.folder, candidate.sha256) if registry else None
    decision = decide(cfg, rules, candidate, champion, known)
    gate.show(decision.findings)
    same = known is not None and champion is not None and known.number == champion.number
    word = "unchanged" if same else WORDS[decision.verdict]
    console.print(f"it would be {word}; nothing was changed")
    found = {"drafter": str(candidate.folder), "decision": word, **decision.evidence()}
    return {"stage": "promote", "plan": found}


def run(cfg: Config) -> dict[str, Any]:
    """Promote `promote.drafter` (default: the newest) if the gate passes; returns the decision.

    Raises ValueError for a folder that is not a drafter, was not evaluated or has changed since its
    evaluation, for a file of rules that cannot be read, and when another promotion holds the lease.
    """
    rules, candidate = read_rules(cfg.promote.gate), read_candidate(cfg)
    if not cfg.place().is_local and not cfg.mlflow.uri:
        console.print(
            f"note: {cfg.place()} can be used by several hosts, but the registry is a file of this "
            "one: set mlflow.uri to a server that all of them reach"
        )
    with promoting(cfg) as moves:
        champion = moves.registry.current(CHAMPION)
        moves.complete_history(champion)
        return _decide(cfg, rules, moves, candidate, champion)


def _decide(
    cfg: Config, rules: Rules, moves: Moves, candidate: Candidate, champion: Version | None
) -> dict[str, Any]:
    registry = moves.registry
    known = registry.known(candidate.folder, candidate.sha256)
    decision = decide(cfg, rules, candidate, champion, known)
    why = evidence(candidate) | decision.evidence()
    if decision.findings[0].verdict == "refuse":  # for another target: it gets no version
        moves.record("refuse", champion, None, candidate.sha256, _text(decision), why)
        return _report("refused", candidate, champion, None, decision)
    labels = tags(candidate) | lineage(cfg, registry, candidate)
    if decision.k:
        labels[K] = json.dumps(decision.k)
    version = registry.register(candidate.folder, labels)
    if champion is not None and champion.number == version.number:
        registry.drop_alias(CHALLENGER, version)
        return _report("unchanged", candidate, champion, version, decision)
    registry.set_alias(CHALLENGER, version)
    if decision.verdict != "pass":
        action, text = decision.verdict, _text(decision)
        moves.record(action, champion, version.number, candidate.sha256, text, why)
        return _report(WORDS[action], candidate, champion, version, decision)
    moves.move("promote", champion, version, "gate passed", why)
    registry.drop_alias(CHALLENGER, version)
    return _report("promoted", candidate, champion, version, decision)


def _text(decision: Decision) -> str:
    return "; ".join(decision.reasons)


def _report(
    word: str,
    candidate: Candidate,
    champion: Version | None,
    version: Version | None,
    decision: Decision,
) -> dict[str, Any]:
    number = version.number if version else None
    before = champion.number if champion else None
    gate.show(decision.findings)
    console.print(
        f"{word}: drafter {candidate.folder.name} (version {number or 'none'}), "
        f"champion before: {before or 'none'}"
    )
    reasons = [] if word in ("promoted", "unchanged") else decision.reasons
    if reasons:
        print_table(f"{word.capitalize()} because", ["reason"], [[reason] for reason in reasons])
    if word == "promoted":
        console.print(f"servers {decision.rollout}")
    return {
        "stage": "promote",
        "ok": word in ("promoted", "unchanged"),
        "decision": word,
        "version": number,
        "previous": before,
        "drafter": str(candidate.folder),
        "drafter_sha256": candidate.sha256,
        "compat_key": candidate.key,
        "tau": candidate.evaluation["tau"]["pooled"],
        "reasons": reasons,
        **decision.evidence(),
    }


if __name__ == "__main__":
    run_as_module("promote")
