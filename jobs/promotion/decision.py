"""All rules of the gate on one candidate, and what follows from them."""

from dataclasses import dataclass
from typing import Any

from dflash.identity import legacy_target_id
from jobs.base.config import Config
from jobs.base.target_facts import target_config
from jobs.promotion import gate
from jobs.promotion.candidate import Candidate
from jobs.promotion.gate import Finding
from jobs.promotion.gate_rules import Rules
from jobs.promotion.speed_rule import judge_speed
from jobs.proof.kept_results import preflight_verdict
from jobs.registry.versions import Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the rules say. `k`: K by batch size to serve with, [] if unknown. `rollout`: what the
    servers do if it becomes champion: swap weights, or restart.
    """

    findings: list[Finding]
    k: list[int]
    rollout: str

    @property
    def verdict(self) -> gate.Verdict:
        """The worst of all findings."""
        return gate.verdict(self.findings)

    @property
    def reasons(self) -> list[str]:
        """Why it does not pass."""
        return [one.reason for one in self.findings if one.verdict != "pass"]

    def evidence(self) -> dict[str, Any]:
        """For the record of the decision."""
        return {
            "rules": gate.as_rows(self.findings),
            "k_by_batch_size": self.k,
            "rollout": self.rollout,
        }


def decide(
    cfg: Config,
    rules: Rules,
    candidate: Candidate,
    champion: Version | None,
    known: Version | None,
) -> Decision:
    """Apply every rule. `known`: the version that this drafter has already, if any."""
    unlike = _unlike(cfg, candidate, champion)
    rollout = "restart" if unlike or champion is None else "swap"
    foreign = foreign_fields(cfg, candidate)
    if foreign:
        found = [Finding(rule="target", verdict="refuse", fix="; ".join(foreign))]
        return Decision(findings=found, k=[], rollout=rollout)
    if champion is not None and champion.sha256 == candidate.sha256:
        compared = Finding(rule="champion", verdict="pass", fix="it is this drafter")
        champion = None
    else:
        if champion is not None and _misfits(cfg, champion):
            champion = None  # nothing replays it on this target, and no server of it loads it
        compared = gate.comparison(candidate.evaluation, champion)
    found = [Finding(rule="target", verdict="pass"), compared]
    if compared.verdict == "pass":  # else the numbers say nothing about this champion
        found += gate.judge(rules, candidate.evaluation, champion)
    if known is not None and known.bad:
        fix = f"version {known.number} was rolled back: {known.bad}"
        found.append(Finding(rule="history", verdict="refuse", fix=fix))
    speed, k = judge_speed(cfg, rules.speed, candidate)
    found += [*speed, _proven(cfg, rules, candidate), _shape(rules, unlike)]
    return Decision(findings=found, k=k, rollout=rollout)


def foreign_fields(cfg: Config, candidate: Candidate) -> list[str]:
    """Why a drafter is not for this target, field by field. No rule can allow such a drafter."""
    ours = {"target_id": candidate.compat["target_id"]} | _widths(cfg)
    drafter = candidate.compat | {"target_id": candidate.evaluation["target_id"]}
    return gate.mismatches(drafter, ours, "the target")


def _widths(cfg: Config) -> dict[str, int]:
    target = target_config(cfg)
    return {
        "hidden_size": target["hidden_size"],
        "vocab_size": target["vocab_size"],
        "num_target_layers": target["num_hidden_layers"],
    }


def _misfits(cfg: Config, champion: Version) -> bool:
    """Whether the champion was made for a target of another shape."""
    return bool(gate.mismatches(champion.compat, _widths(cfg), "the target"))


def _unlike(cfg: Config, candidate: Candidate, champion: Version | None) -> list[str]:
    """In which fields the drafter's shape differs from the champion's."""
    if champion is None:
        return []
    # An older release of this package did not record some options; it had them off (0).
    theirs = dict.fromkeys(candidate.compat, 0) | champion.compat
    # The former id did not cover all bytes of the target. But the evaluation replayed this very
    # champion, on the target that it names.
    if theirs["target_id"] == legacy_target_id(cfg.target_path):
        theirs["target_id"] = candidate.evaluation["target_id"]
    return gate.mismatches(candidate.compat, theirs, "the champion")


def _shape(rules: Rules, unlike: list[str]) -> Finding:
    fix = "; ".join(unlike)
    if unlike and rules.shape.may_change:
        return Finding(rule="shape", verdict="pass", value="restart", fix=fix)
    if unlike:
        fix += " (shape.may_change: true allows it)"
        return Finding(rule="shape", verdict="refuse", value="restart", fix=fix)
    return Finding(rule="shape", verdict="pass", value="same")


def _proven(cfg: Config, rules: Rules, candidate: Candidate) -> Finding:
    """Whether it is proven that the serving engine drafts what replay does."""
    value = preflight_verdict(cfg, candidate.folder)
    if value == "passed" or not rules.preflight.required:
        return Finding(rule="preflight", verdict="pass", value=value)
    fix = f"no passed preflight under these settings: run `flywheel preflight {candidate.folder}`"
    verdict = "refuse" if value == "failed" else "hold"
    return Finding(rule="preflight", verdict=verdict, value=value, limit="passed", fix=fix)
