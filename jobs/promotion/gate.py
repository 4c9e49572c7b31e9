"""The gate: every reason why a drafter must not become champion, from its evaluation alone."""

from typing import Any

from jobs.base.console import short_name
from jobs.base.sections.judging import Promote
from jobs.evaluation.intervals import FEWEST
from jobs.registry.versions import Version

Fields = dict[str, Any]

MAX_LEAKING = 0.01
"""Largest allowed share of held-out samples whose text is also in training rows. Even if a drafter
has memorised them, they raise tau by at most this share of its range (1 to K + 1): 0.07 at K = 7.
"""


def mismatches(drafter: Fields, other: Fields, whose: str) -> list[str]:
    """One reason per field of `other` in which `drafter` differs: 'block_size is 8, ... has 16'."""
    return [
        f"{name} is {_plain(drafter.get(name))}, {whose} has {_plain(value)}"
        for name, value in other.items()
        if _plain(drafter.get(name)) != _plain(value)
    ]


def stale(evaluation: Fields, champion: Version | None) -> list[str]:
    """Why an evaluation says nothing about the present champion: its baseline is another drafter.
    Empty if the baseline is the champion, or there is neither.
    """
    baseline = evaluation["baseline"]
    then = baseline["drafter_sha256"] if baseline else None
    now = champion.sha256 if champion else None
    if then == now:
        return []
    seen = f"compared with {then[:12]}" if then else "compared with no drafter"
    is_now = f"version {champion.number} ({champion.sha256[:12]})" if champion else "none"
    return [
        f"the evaluation {seen}, but the champion is {is_now}: evaluate again "
        "(evaluate.baseline left empty)"
    ]


def refusals(limits: Promote, evaluation: Fields, champion: Version | None) -> list[str]:
    """Reasons that follow from the numbers of the evaluation; empty if it is good enough. Without a
    champion the drafter is compared with serving without a drafter, where tau is 1.
    """
    tau = evaluation["tau"]
    reasons = _leaks(evaluation["leaking"])
    if tau["pooled"] < limits.min_tau:
        reasons.append(f"tau {tau['pooled']:.3f} is below promote.min_tau {limits.min_tau}")
    baseline = evaluation["baseline"]
    if champion is None or baseline is None:
        interval, domains = tau["ci"], dict.fromkeys(tau["domains"], 1.0)
        gain = interval and interval[0] - 1.0
    else:
        interval, domains = baseline["delta_ci"], baseline["tau"]["domains"]
        gain = interval and interval[0]
    if gain is None:
        reasons.append(
            f"fewer than {FEWEST} held-out conversations have a round: ingest more traffic, or "
            "raise ingest.test_percent"
        )
    elif not gain > limits.min_gain:
        reasons.append(
            f"the lower end of the tau gain is {gain:+.3f}, not above promote.min_gain "
            f"{limits.min_gain:+.3f}"
        )
    for domain, before in sorted(domains.items()):
        loss = before - tau["domains"].get(domain, 0.0)
        if loss > limits.max_domain_loss:
            reasons.append(
                f"domain {short_name(domain)} loses {loss:.3f} tau, more than "
                f"promote.max_domain_loss {limits.max_domain_loss}"
            )
    for name, why in evaluation.get("regression_skipped", {}).items():
        reasons.append(f"regression set {name} was not measured: {why}")
    for name, found in evaluation.get("regression", {}).items():
        if found["baseline"] and -found["baseline"]["delta"] > limits.max_domain_loss:
            reasons.append(
                f"regression set {name} loses {-found['baseline']['delta']:.3f} tau, more than "
                f"promote.max_domain_loss {limits.max_domain_loss}"
            )
    return reasons


def _leaks(found: Fields) -> list[str]:
    leaking, samples = found["leaking"], found["samples"]
    if leaking <= MAX_LEAKING * samples:
        return []
    return [
        f"{leaking} of {samples} held-out samples share their text with training samples, so tau "
        "is no measure for new traffic: ingest the logs again into a new work folder (equal "
        "beginnings then stay on one side of the split), train and evaluate there"
    ]


def _plain(value: Any) -> Any:
    """A tuple as a list, as it is after a round trip through JSON."""
    return list(value) if isinstance(value, tuple) else value
