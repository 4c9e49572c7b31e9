"""The gate: the rules of gate.yaml applied to an evaluation. Every rule gives a finding.

Its verdict is one of three. `refuse`: what the rule forbids is established. `hold`: there is too
little data to say, which is never a pass; `fix` says what would decide. `pass`: neither.
"""

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Literal

from jobs.base.console import print_table, short_name, some_names
from jobs.evaluation.intervals import FEWEST
from jobs.promotion.gate_rules import Losses, Rules
from jobs.registry.versions import Version

Fields = dict[str, Any]
Verdict = Literal["pass", "hold", "refuse"]
TOKENS = "tokens per round"
ORDER: tuple[Verdict, ...] = ("pass", "hold", "refuse")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one rule says, with its evidence. `value` and `limit` are in `unit`; `interval` is that
    of `value`; `conversations` is the number that it comes from. `fix`: why, and what to do.
    """

    rule: str
    verdict: Verdict
    value: float | str | None = None
    limit: float | str | None = None
    unit: str = ""
    interval: list[float] | None = None
    conversations: int | None = None
    fix: str = ""

    @property
    def reason(self) -> str:
        """The finding in one sentence."""
        return f"{self.rule}: {self.fix}"


def verdict(findings: list[Finding]) -> Verdict:
    """The worst of all."""
    return ORDER[max(ORDER.index(one.verdict) for one in findings)]


def show(findings: list[Finding]) -> None:
    """Print every rule with its evidence."""
    columns = ["rule", "verdict", "value", "limit", "unit", "interval", "conversations", "note"]
    lines = []
    for one in findings:
        ends = one.interval and " .. ".join(f"{end:.4g}" for end in one.interval)
        evidence = [one.value, one.limit, one.unit, ends, one.conversations]
        lines.append([one.rule, one.verdict, *evidence, one.fix])
    print_table("The gate", columns, lines, most=None)


def as_rows(findings: list[Finding]) -> list[Fields]:
    """The findings as JSON, for the record of a decision and for the summary."""
    return [asdict(one) for one in findings]


def mismatches(drafter: Fields, other: Fields, whose: str) -> list[str]:
    """One reason per field of `other` in which `drafter` differs: 'block_size is 8, ... has 16'."""
    return [
        f"{name} is {_plain(drafter.get(name))}, {whose} has {_plain(value)}"
        for name, value in other.items()
        if _plain(drafter.get(name)) != _plain(value)
    ]


def comparison(evaluation: Fields, champion: Version | None) -> Finding:
    """Whether the evaluation says something about the present champion: its baseline must be it."""
    baseline = evaluation["baseline"]
    then = baseline["drafter_sha256"] if baseline else None
    now = champion.sha256 if champion else None
    seen = f"compared with {then[:12]}" if then else "compared with no drafter"
    is_now = f"version {champion.number} ({champion.sha256[:12]})" if champion else "none"
    if then == now:
        return Finding(rule="champion", verdict="pass", value=then and then[:12], fix=seen)
    fix = (
        f"the evaluation {seen}, but the champion is {is_now}: evaluate again "
        "(evaluate.baseline left empty)"
    )
    return Finding(rule="champion", verdict="hold", value=then and then[:12], fix=fix)


def judge(rules: Rules, evaluation: Fields, champion: Version | None) -> list[Finding]:
    """The rules about tau. Without a champion the drafter is compared with serving without a
    drafter, where tau is 1.
    """
    found = [_tau(rules, evaluation), _gain(rules, evaluation, champion)]
    baseline = evaluation["baseline"]
    if champion is not None and baseline is not None:
        if "judged" not in baseline:
            raise ValueError(
                "the evaluation was written by an earlier release, without the intervals of "
                "domains: run `flywheel evaluate` again"
            )
        found += [loss("domain", rules.domains, part) for part in baseline["judged"]]
    for name, why in evaluation.get("regression_skipped", {}).items():
        fix = f"set {short_name(name)} was not measured: {why}"
        found.append(Finding(rule="regression", verdict="hold", fix=fix))
    for name, one in evaluation.get("regression", {}).items():
        if one["baseline"] is not None:
            part = one["baseline"]["judged"][0] | {"name": name}
            found.append(loss("regression", rules.regression, part))
    return [*found, _leaks(rules, evaluation["leaking"])]


def _tau(rules: Rules, evaluation: Fields) -> Finding:
    tau, least = evaluation["tau"], rules.tau.min
    value, interval, count = tau["pooled"], tau["ci"], evaluation.get("conversations")
    verdict, fix = "pass", ""
    if interval is None:
        verdict, fix = "hold", _too_few()
    elif interval[1] < least:
        verdict, fix = "refuse", f"tau {value:.3f} is below tau.min {least:g}: train longer"
    elif interval[0] < least:
        verdict = "hold"
        fix = f"tau {value:.3f} is not established to reach tau.min {least:g}"
        fix += _more(count, value - interval[0], value - least)
    return Finding(
        rule="tau",
        verdict=verdict,
        value=value,
        limit=least,
        unit=TOKENS,
        interval=interval,
        conversations=count,
        fix=fix,
    )


def _gain(rules: Rules, evaluation: Fields, champion: Version | None) -> Finding:
    tau, baseline = evaluation["tau"], evaluation["baseline"]
    if champion is None or baseline is None:
        before, value, interval = 1.0, tau["pooled"] - 1.0, tau["ci"]
        interval = interval and [end - 1.0 for end in interval]
        count, visible = evaluation.get("conversations"), None
    else:
        before, value = baseline["tau"]["pooled"], baseline["delta"]
        interval, count = baseline["delta_ci"], baseline["conversations"]
        visible = baseline["detectable"]
    least, worth = rules.gain.min, rules.gain.worth * before
    verdict, fix = "pass", ""
    if interval is None:
        verdict, fix = "hold", _too_few()
    elif not interval[0] > least:
        seen = f"the lower end of the tau gain is {interval[0]:+.3f}, not above gain.min {least:+g}"
        short = interval[1] > least + worth and (visible is None or visible > worth)
        verdict, fix = ("hold", seen) if short else ("refuse", f"{seen}: no gain worth a promotion")
        if short:
            fix += _more(count, visible or value - interval[0], max(value - least, worth))
    return Finding(
        rule="gain",
        verdict=verdict,
        value=value,
        limit=least,
        unit=TOKENS,
        interval=interval,
        conversations=count,
        fix=fix,
    )


def loss(rule: str, limits: Losses, part: Fields) -> Finding:
    """Whether a loss in a domain or set is established. It passes if a loss of `visible` is
    excluded, or such a loss would be refused in 4 of 5 cases; else there is too little data.
    """
    name = short_name(part["name"])
    if not part["name"]:
        name = f"({len(part['members'])} rare domains: {some_names(part['members'])})"
    before, interval, visible = part["before"], part["ci_corrected"], part["detectable"]
    most, large = limits.max_loss * before, limits.visible * before
    verdict, fix = "pass", ""
    if limits.visible == 1 and (interval is None or interval[1] >= -most):
        pass  # nothing has to be visible
    elif interval is None:
        verdict, fix = "hold", f"{part['conversations']} conversations, {_too_few()}"
    elif interval[1] < -most:
        verdict = "refuse"
        fix = f"a loss of more than {limits.max_loss:.1%} of tau {before:.3f} is established"
    elif part["ci"][0] <= -large and (visible is None or visible > large - most):
        verdict, fix = "hold", f"too little data to see a loss of {limits.visible:.1%}"
        fix += _more(part["conversations"], visible, large - most, f" of {name}")
    return Finding(
        rule=f"{rule} {name}",
        verdict=verdict,
        value=part["delta"],
        limit=-most,
        unit=TOKENS,
        interval=interval,
        conversations=part["conversations"],
        fix=fix,
    )


def _leaks(rules: Rules, found: Fields) -> Finding:
    leaking, samples, most = found["leaking"], found["samples"], rules.leaking.max_share
    verdict, fix = "pass", ""
    if leaking > most * samples:
        verdict = "refuse"
        fix = (
            f"{leaking} of {samples} held-out samples share their text with training samples, so "
            "tau is no measure for new traffic: ingest the logs again into a new work folder "
            "(equal beginnings then stay on one side of the split), train and evaluate there"
        )
    share = leaking / samples if samples else None
    return Finding(
        rule="leaking", verdict=verdict, value=share, limit=most, unit="share of samples", fix=fix
    )


def _too_few() -> str:
    return (
        f"fewer than {FEWEST} held-out conversations have a round: ingest more traffic, or raise "
        "ingest.test_percent"
    )


def _more(count: int | None, reach: float | None, wanted: float, whose: str = "") -> str:
    """How many more conversations decide, if `count` of them reach as far as `reach` and `wanted`
    is needed: the error falls with the root of their number.
    """
    if not count or not reach or wanted <= 0:
        return ": more held-out conversations would decide"
    more = ceil(round(count * (reach / wanted) ** 2, 6)) - count
    return f": about {max(more, 1)} more held-out conversations{whose} would decide"


def _plain(value: Any) -> Any:
    """A tuple as a list, as it is after a round trip through JSON."""
    return list(value) if isinstance(value, tuple) else value
