"""What serving a drafter brings by batch size, from replayed tau and measured costs."""

from jobs.base.config import Config
from jobs.promotion.candidate import Candidate
from jobs.promotion.gate import Finding
from jobs.promotion.gate_rules import Speed
from jobs.proof.choose_k import Choice, by_batch, choices, predicted
from jobs.proof.kept_results import known_costs, verify_faults

UNIT = "times plain decoding"


def judge_speed(cfg: Config, rule: Speed, candidate: Candidate) -> tuple[list[Finding], list[int]]:
    """A finding per batch size and one about all, and the K to serve with; [] where no costs are
    known.

    A batch size at which nothing pays gets K 0, which is no refusal. A drafter that pays at none is
    refused. The interval is that of tau, as a share of tau.
    """
    costs, source = known_costs(cfg, candidate.sha256, candidate.compat)
    if source is None:
        fix = f"run `flywheel verify {candidate.folder}`, which measures what a round costs"
        if cfg.serve.k:
            fix += " where serve.k is empty"
        if faults := verify_faults(cfg, candidate.sha256):
            fix = f"its `flywheel verify` failed, so its costs decide nothing: {'; '.join(faults)}"
        if rule.required:
            return [Finding(rule="speed", verdict="hold", unit=UNIT, fix=fix)], []
        note = "not measured, and speed.required is false"
        return [Finding(rule="speed", verdict="pass", unit=UNIT, fix=note)], []
    evaluation = candidate.evaluation
    tau = evaluation["tau"]
    taus = {int(k): value for k, value in evaluation["tau_by_k"].items()}
    if not predicted(taus, costs, 1):
        fix = f"it was evaluated at K {min(taus)} to {max(taus)}, and costs are known for others: "
        fix += f"run `flywheel verify {candidate.folder}` again"
        return [Finding(rule="speed", verdict="hold", unit=UNIT, fix=fix)], []
    found = choices(taus, costs, rule.floor)
    findings = []
    for one in found:
        what = f"K {one.k}" if one.k else f"K 0: no drafts, K {one.best} is the nearest to paying"
        ends = tau["ci"] and [one.speedup * end / tau["pooled"] for end in tau["ci"]]
        findings.append(
            Finding(
                rule=f"speed, {one.batch} at once",
                verdict="pass",
                value=one.speedup,
                limit=one.floor,
                unit=UNIT,
                interval=ends,
                fix=what,
            )
        )
    return [*findings, _overall(found, source["drafter"])], list(by_batch(found))


def _overall(found: list[Choice], measured: str) -> Finding:
    """Whether it pays at any batch size. `measured`: the drafter that the costs are of."""
    best = max(found, key=lambda one: one.speedup - one.floor)
    pays = any(one.k for one in found)
    fix = f"costs as measured with {measured}"
    if not pays:
        told = ", ".join(f"{one.speedup:.3f} at {one.batch} (K {one.best})" for one in found)
        fix = f"it pays at no batch size; predicted {told}; {fix}"
    return Finding(
        rule="speed",
        verdict="pass" if pays else "refuse",
        value=best.speedup,
        limit=best.floor,
        unit=UNIT,
        fix=fix,
    )
