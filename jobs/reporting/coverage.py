"""What was tested and what not: one line per check, also for a check that was not done."""

from dataclasses import dataclass

from jobs.base.console import short_name
from jobs.dataset.slices import SHOWN, largest
from jobs.proof.round_comparison import unexplained
from jobs.reporting.facts import ALL, Facts, pick

DIMENSIONS = (
    "language",
    "prompt tokens",
    "place in the answer",
    "thinking",
    "temperature",
    "shaped",
)
REASONS = 5
"""Most reasons for setting samples aside that are shown: the most frequent ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A check: whether it was done, on what data, and what it does not cover."""

    check: str
    done: str  # yes | no | failed
    on: str


def lines(facts: Facts) -> list[Line]:
    """One line for every check, done or not."""
    return [
        _replay(facts),
        _leakage(facts),
        _set_aside(facts),
        _sampled(facts),
        _slices(facts),
        _baseline(facts),
        _regression(facts),
        _preflight(facts),
        _served(facts),
        _reference(facts),
        _text(facts),
        _speed(facts),
    ]


def _line(check: str, done: bool, on: str, ok: bool = True) -> Line:
    return Line(check=check, done=("yes" if ok else "failed") if done else "no", on=on)


def _counted(requests: int, conversations: int) -> str:
    return f"{requests} requests of {conversations} conversations"


def _replay(facts: Facts) -> Line:
    evaluation = facts.evaluation
    where = {"drafter_version": facts.version, "origin": "replay"}
    ks = sorted({r["k"] for r in pick(facts.taus, **where)})
    count = _counted(evaluation["samples"], evaluation["conversations"])
    parts = evaluation["tau"]["slices"]["domain"]
    counts = {name: part["conversations"] for name, part in parts.items()}
    domains = ", ".join(f"{short_name(name)} {counts[name]}" for name in largest(counts))
    if len(counts) > SHOWN:
        domains += f", and {len(counts) - SHOWN} smaller ones"
    text = (
        f"{count} (conversations by domain: {domains}), {evaluation['rounds']} rounds at K "
        f"{evaluation['k']}; K {ks[0]} to {ks[-1]}; split {evaluation['split']}"
    )
    return _line("replay of held-out conversations", True, text)


def _leakage(facts: Facts) -> Line:
    name, found = "held-out text apart from training text", facts.evaluation.get("leaking")
    if found is None:
        return _line(name, False, "this evaluation did not check: run flywheel evaluate again")
    text = (
        f"{found['leaking']} of {found['samples']} held-out samples share their text with "
        "training samples"
    )
    return _line(name, True, text, not found["leaking"])


def _set_aside(facts: Facts) -> Line:
    """Samples that neither training nor replay has used."""
    found = facts.set_aside
    reasons = "; ".join(f"{reason}: {found[reason]}" for reason in largest(found, REASONS))
    text = f"{sum(found.values())} samples were set aside by harvest, mostly {reasons}"
    return _line("samples set aside", True, text if found else "none")


def _sampled(facts: Facts) -> Line:
    where = {"drafter_version": facts.version, "origin": "replay", "domain": ALL}
    rows = pick(facts.taus, **where, k=facts.evaluation["k"])
    sampled = [r for r in rows if r["temperature"]]
    text = (
        f"{sum(r['requests'] for r in sampled)} recorded answers at temperature "
        f"{min(r['temperature'] for r in sampled):g} to {max(r['temperature'] for r in sampled):g},"
        " replayed; none served"
        if sampled
        else "the held-out traffic has none"
    )
    return _line("sampled requests", bool(sampled), text)


def _slices(facts: Facts) -> Line:
    found = facts.evaluation["tau"]["slices"]
    apart = [name for name in DIMENSIONS if name in found]
    alike = [name for name in DIMENSIONS if name not in found]
    text = f"by {', '.join(['domain', *apart])}"
    if alike:
        text += f"; not by {', '.join(alike)}: all requests are alike in it, or logs do not say"
    hidden = sum(max(0, len(parts) - SHOWN) for parts in found.values())
    if hidden:
        text += f"; {hidden} smaller ones are in the evaluation's file only"
    return _line("slices", True, text)


def _baseline(facts: Facts) -> Line:
    baseline = facts.baseline
    text = (
        f"{baseline['drafter']}, paired on {baseline['conversations']} conversations"
        if baseline
        else "there was no champion and evaluate.baseline was not set"
    )
    return _line("comparison with another drafter", bool(baseline), text)


def _regression(facts: Facts) -> Line:
    sets = facts.evaluation["regression"]
    parts = [f"{name} {one['samples']} prompts" for name, one in sets.items()]
    skipped = facts.evaluation.get("regression_skipped", {})
    parts += [f"not {name}: {why}" for name, why in skipped.items()]
    text = ", ".join(parts) or "evaluate.regression names none"
    return _line("regression sets", bool(sets) and not skipped, text)


def _preflight(facts: Facts) -> Line:
    found, name = facts.preflight, "preflight on the serving engine"
    if found is None:
        return _line(name, False, "flywheel preflight does it")
    statuses = [check["status"] for check in found["checks"]]
    text = ", ".join(f"{statuses.count(s)} {s}" for s in ("ok", "warn", "skip", "fail"))
    if "tau_served" in found:
        k = len(found["tau_served"]["positions"])
        text += f"; {found['rounds']} rounds, greedy, K {k}"
    return _line(name, True, f"{text}; {found['vllm']}", found["ok"])


def _served(facts: Facts) -> Line:
    name, verified = "acceptance counted by vLLM", facts.verified
    if verified is None:
        return _line(name, False, "flywheel verify does it")
    measured = facts.measured("served", facts.k)
    count = _counted(measured.requests, measured.conversations) if measured else "rows removed"
    text = (
        f"{count}, {verified['rounds']} rounds, greedy, K {verified['k']}; no other K, no sampled"
    )
    compared = verified.get("comparison", {})
    if compared.get("unchecked"):
        return _line(name, False, f"{text}; not checked: {compared['unchecked']}")
    faults = compared.get("faults", [])
    return _line(name, True, "; ".join([text, *faults]), not faults)


def _reference(facts: Facts) -> Line:
    name = "replay against the reference decoder"
    if facts.verified is None:
        return _line(name, False, "flywheel verify does it")
    one = facts.verified["reference"]
    text = (
        f"{one['identical']} of {one['requests']} greedy requests equal in every round "
        f"({one['rounds']} rounds), float32"
    )
    if not one["requests"]:
        return _line(name, False, one["skipped"])
    wrong = unexplained(one)
    near = one["requests"] - one["identical"] - len(wrong)
    text += f", {near} at near ties" if near else ""
    return _line(name, True, text, not wrong)


def _text(facts: Facts) -> Line:
    name = "the drafter does not change the text"
    if facts.verified is None:
        return _line(name, False, "flywheel verify does it")
    greedy = facts.verified["greedy"]
    text = (
        f"{greedy['identical']} of {greedy['requests']} greedy texts identical, "
        f"{greedy['near_ties']} near ties, {greedy['different']} different"
    )
    return _line(name, True, text, not greedy["different"])


def _speed(facts: Facts) -> Line:
    if facts.verified is None:
        return _line("speed", False, "flywheel verify does it")
    at = " and ".join(facts.verified["speedup"])
    text = (
        f"{at} requests at a time, domain {short_name(facts.verified['speed_domain'])}, greedy, "
        "on the machine that verified; no other load, machine or engine"
    )
    return _line("speed", True, text)
