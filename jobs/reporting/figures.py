"""The plots of a report: which there are, from which numbers, and their captions."""

from collections.abc import Mapping

from jobs.base.console import short_name
from jobs.dataset.slices import largest
from jobs.reporting import plotting
from jobs.reporting.facts import Facts, Measured, Row, pick

MOST = 12
"""Most slices of one dimension in a plot, those with the most rounds; the table has more."""

Picture = dict[str, str] | None


def draw(facts: Facts) -> dict[str, dict[str, str]]:
    """The plots for which there are numbers: {id: {caption, svg}}."""
    at_k = {origin: facts.measured(origin, facts.k) for origin in ("replay", "served")}
    found = {origin: measured for origin, measured in at_k.items() if measured}
    return {
        name: picture
        for name, picture in {
            "positions": _positions(facts, found),
            "endings": _endings(facts, found),
            "domains": _domains(found),
            "slices": _slices(facts),
            "gains": _gains(facts),
            "k": _by_k(facts, found),
            "speed": _speed(facts),
        }.items()
        if picture
    }


def _picture(caption: str, svg: str) -> Picture:
    return {"caption": caption, "svg": svg}


def _positions(facts: Facts, found: Mapping[str, Measured]) -> Picture:
    if not found:
        return None
    lines = dict(found)
    if facts.baseline:
        other = next(v for v in facts.names if v != facts.version)
        before = facts.measured("replay", facts.k, other)
        lines |= {"baseline": before} if before else {}
    words = "; ".join(
        f"{name} {', '.join(f'{rate:.0%}' for rate in m.positions)}" for name, m in lines.items()
    )
    drawn = {name: (m.positions, m.positions_ci) for name, m in lines.items()}
    caption = f"Acceptance by position, K = {facts.k}, greedy: {words}. Strokes: 95% intervals."
    return _picture(caption, plotting.lines_by_position(drawn))


def _endings(facts: Facts, found: Mapping[str, Measured]) -> Picture:
    origin = "served" if "served" in found else "replay"
    rows = endings(facts, origin)
    if not rows:
        return None
    how = "served" if origin == "served" else "replayed"
    caption = f"Where rounds end, {how}, K = {facts.k}, greedy; all bars together are all rounds."
    return _picture(caption, plotting.waterfall(rows))


def endings(facts: Facts, origin: str) -> list[tuple[str, float]]:
    """(how rounds end, share of rounds): at a rejected draft 1, 2, ..., then for other reasons."""
    where = {
        "drafter_version": facts.version,
        "origin": origin,
        "k": facts.k,
        "temperature": 0.0,
    }
    rows = pick(facts.endings, **where)
    shares = {(r["ending"], r["draft"]): r["share_of_rounds"] for r in rows}
    if not shares:
        return []
    found = [
        (f"draft {k} rejected", shares.get(("rejected", k), 0.0)) for k in range(1, facts.k + 1)
    ]
    named = {"answer ended": "answer ended", "nothing drafted": "nothing drafted"}
    named |= {"all accepted": f"all {facts.k} accepted"}
    return found + [(text, shares[e, None]) for e, text in named.items() if (e, None) in shares]


def _domains(found: Mapping[str, Measured]) -> Picture:
    if len(found) < 2:
        return None
    kept = largest(next(iter(found.values())).rounds_by_domain, MOST)
    taus = {o: {n: t for n, t in m.domains.items() if n in kept} for o, m in found.items()}
    caption = "Served beside replayed tau by domain, greedy; dotted: no drafter."
    return _picture(caption, plotting.bars_by_domain(taus))


def _slices(facts: Facts) -> Picture:
    evaluation, baseline = facts.evaluation, facts.baseline
    groups = {
        dimension: [(name, p["tau"], p["ci"]) for name, p in _largest(parts).items()]
        for dimension, parts in evaluation["tau"]["slices"].items()
    }
    before = baseline["tau"]["slices"] if baseline else {}
    others = {d: {n: p["tau"] for n, p in parts.items()} for d, parts in before.items()}
    mark = f" Gray: {baseline['drafter']}." if baseline else ""
    caption = (
        f"Replayed tau by slice, K = {evaluation['k']}, with 95% intervals (hollow: too few "
        f"conversations for one). Dotted: all requests.{mark}"
    )
    pooled = evaluation["tau"]["pooled"]
    return _picture(caption, plotting.forest(groups, "tau, tokens per round", pooled, others))


def _gains(facts: Facts) -> Picture:
    baseline = facts.baseline
    if not baseline:
        return None
    groups = {"all": [("held-out requests", baseline["delta"], baseline["delta_ci"])]}
    for dimension, parts in baseline["delta_slices"].items():
        kept = _largest(facts.evaluation["tau"]["slices"][dimension])
        groups[dimension] = [(n, g["delta"], g["ci"]) for n, g in parts.items() if n in kept]
    sets = {n: found["baseline"] for n, found in facts.evaluation["regression"].items()}
    if sets:
        groups["regression set"] = [(n, b["delta"], b["delta_ci"]) for n, b in sets.items()]
    groups["share of rounds accepting"] = [
        (f"draft {i}", one["delta"], one["ci"])
        for i, one in enumerate(baseline["delta_positions"], 1)
    ]
    caption = f"Gain over {baseline['drafter']} on the same samples; right of the line is better."
    return _picture(caption, plotting.forest(groups, "difference", 0.0, {}))


def _largest(parts: Mapping[str, Row]) -> dict[str, Row]:
    return {n: parts[n] for n in largest({n: p["rounds"] for n, p in parts.items()}, MOST)}


def _by_k(facts: Facts, found: Mapping[str, Measured]) -> Picture:
    taus = {"replay": facts.tau_by_k(facts.version)}
    if len(taus["replay"]) < 2:
        return None
    if "served" in found:
        taus["served"] = {facts.k: found["served"].tau}
    others = [facts.tau_by_k(v) for v in facts.names if v != facts.version]
    taus |= {"baseline": others[0]} if others and others[0] else {}
    alpha = facts.evaluation["alpha"]
    model = {int(k): tau for k, tau in alpha["tau"].items()}
    caption = (
        "Tau by number of draft tokens, greedy. Plain line: the model of one acceptance chance for "
        f"every draft, {alpha['fit']:.3f}; its misfit is in the table."
    )
    return _picture(caption, plotting.lines_by_k(taus, model))


def _speed(facts: Facts) -> Picture:
    verified = facts.verified
    if not verified or not verified["predicted"]:
        return None
    predicted = {
        int(batch): {int(k): ratio for k, ratio in values.items()}
        for batch, values in verified["predicted"].items()
    }
    chosen = verified.get("speed_k", verified["k_by_batch_size"])
    measured = {
        int(batch): (chosen[min(int(batch), len(chosen)) - 1], ratio)
        for batch, ratio in verified["speedup"].items()
    }
    caption = (
        "Speed against no drafter. Lines: predicted, replayed tau x plain step / round. "
        f"Filled: measured, domain {short_name(verified['speed_domain'])}."
    )
    return _picture(caption, plotting.speedups(predicted, measured))
