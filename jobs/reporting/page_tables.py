"""The sentences and tables of a report."""

from itertools import groupby

from dflash.drafter_config import head_name
from jobs.base.console import short_name
from jobs.dataset.slices import SHOWN, largest
from jobs.reporting.facts import ORIGINS, Facts, Measured, Row


def lead(facts: Facts) -> str:
    """The result in a sentence or two."""
    replayed = facts.measured("replay", facts.k)
    served = facts.measured("served", facts.k)
    best = served or replayed
    if best is None:
        pooled = facts.evaluation["tau"]["pooled"]
        return f"Replayed on sampled requests, a round gives {pooled:.2f} tokens."
    how = "Served by vLLM" if served else "Replayed"
    head = head_name(facts.evaluation.get("compat", {}))
    text = f"{how}, a round of {best.k} drafts by {head} gives {best.tau:.2f} tokens"
    if best.ci:
        text += f" (95% interval {best.ci[0]:.2f} to {best.ci[1]:.2f})"
    text += "; without a drafter it gives 1."
    if served and replayed:
        gap = replayed.tau / served.tau - 1
        text += f" Replay of the recorded answers gave {replayed.tau:.2f} ({gap:+.1%})"
        text += f"{_same_text(facts)}."
    return text


def _same_text(facts: Facts) -> str:
    """How near replay is on the texts that were served, which need not be the recorded ones."""
    compared = (facts.verified or {}).get("comparison", {})
    if not compared.get("tau_served"):
        return ""
    gap = compared["tau_replay"] / compared["tau_served"] - 1
    return f", replay of the served ones {compared['tau_replay']:.2f} ({gap:+.1%})"


def headline(facts: Facts) -> list[tuple[str, Measured]]:
    """(name, numbers) of greedy rows: this drafter at the served K and at its largest, the baseline
    at its largest.
    """
    ks = {version: [k] for version, k in facts.largest.items()}
    ks[facts.version] = sorted({facts.k, facts.evaluation["k"]})
    found = [facts.measured(o, k, v) for v in facts.names for k in ks[v] for o in ORIGINS]
    return [(_name(facts, m.version), m) for m in found if m]


def _name(facts: Facts, version: str) -> str:
    mark = " (champion)" if version == facts.champion else ""
    return facts.names[version] + mark


def verdict(facts: Facts) -> str:
    """This drafter against the baseline of its evaluation, in one sentence."""
    baseline = facts.baseline
    if baseline is None:
        return (
            "When this drafter was evaluated there was no champion to compare it with: it is "
            "compared with serving without a drafter, tau 1."
        )
    if baseline["delta_ci"] is None:
        return (
            f"Compared with {baseline['drafter']} tau differs by {baseline['delta']:+.3f}; there "
            "are too few conversations for an interval, so this decides nothing."
        )
    low, high = baseline["delta_ci"]
    word = "better" if low > 0 else "worse" if high < 0 else "not distinguishable"
    return (
        f"On the same samples tau is {facts.evaluation['tau']['pooled']:.3f} against "
        f"{baseline['tau']['pooled']:.3f} of {baseline['drafter']}: {word}, difference "
        f"{baseline['delta']:+.3f} (95% interval {low:+.3f} to {high:+.3f}, paired by "
        "conversation)."
    )


def leakage(facts: Facts) -> str:
    """A warning if training has seen held-out text; empty if not, or if that was not checked."""
    found = facts.evaluation.get("leaking")
    if not found or not found["leaking"]:
        return ""
    return (
        f"{found['leaking']} of {found['samples']} held-out samples share their text with training "
        "samples: for new traffic the numbers below are too good."
    )


def verified_faults(facts: Facts) -> list[str]:
    """Why the newest `flywheel verify` of the drafter failed; [] if it did not."""
    verified = facts.verified or {}
    if verified.get("ok", True):
        return []
    return verified.get("faults") or ["its result does not say why"]


def power(facts: Facts) -> str:
    """Which gain so many conversations can detect, and how many a smaller gain needs."""
    baseline = facts.baseline
    if baseline is None or baseline["detectable"] is None:
        return ""
    before = baseline["tau"]["pooled"]
    needed = [
        f"{count} for a gain of {share} ({float(share.rstrip('%')) / 100 * before:+.3f})"
        for share, count in baseline["conversations_for"].items()
        if count
    ]
    text = (
        f"These {baseline['conversations']} conversations find a true difference of "
        f"{baseline['detectable']:.3f} tau in 4 of 5 cases; of a smaller one they say little."
    )
    return text + (f" Conversations that a decision needs: {', '.join(needed)}." if needed else "")


def slice_table(facts: Facts) -> list[Row]:
    """The largest slices and each regression set, with intervals and the gain over a baseline."""
    evaluation, baseline = facts.evaluation, facts.baseline
    rows = [_slice_row("all", "held-out requests", _pooled(evaluation), baseline)]
    for dimension, parts in evaluation["tau"]["slices"].items():
        gains = baseline["delta_slices"].get(dimension, {}) if baseline else {}
        kept = largest({name: part["rounds"] for name, part in parts.items()})
        rows += [_slice_row(dimension, name, parts[name], gains.get(name)) for name in kept]
    for name, found in evaluation["regression"].items():
        rows.append(_slice_row("regression set", name, _pooled(found), found["baseline"]))
    return rows


def _pooled(found: Row) -> Row:
    return {
        "tau": found["tau"]["pooled"],
        "ci": found["tau"]["ci"],
        "rounds": found["rounds"],
        "conversations": found["conversations"],
    }


def _slice_row(dimension: str, name: str, part: Row, gain: Row | None) -> Row:
    """`gain`: {delta, ci} of a slice, or the whole comparison with its delta_ci."""
    ci = None if gain is None else gain.get("delta_ci", gain.get("ci"))
    return part | {
        "dimension": dimension,
        "name": short_name(name),
        "delta": gain and gain["delta"],
        "delta_ci": ci,
    }


def k_table(facts: Facts) -> list[Row]:
    """For each K: tau, what its last draft adds, the model with one chance, predicted speed-ups."""
    evaluation, before, rows = facts.evaluation, 1.0, []
    speed = facts.verified["predicted"] if facts.verified else {}
    for k, tau in evaluation["tau_by_k"].items():
        rows.append(
            {
                "k": int(k),
                "tau": tau,
                "adds": tau - before,
                "model": evaluation["alpha"]["tau"][k],
                "misfit": evaluation["alpha"]["misfit"][k],
                "speed": [values.get(k) for values in speed.values()],
            }
        )
        before = tau
    return rows


def k_advice(facts: Facts) -> list[str]:
    """Which K to serve with, or what is missing to recommend one."""
    verified = facts.verified
    if verified is None:
        return [
            "No K is recommended: the best K depends on what a round costs on your machine, which "
            "was not measured. flywheel verify measures it. Until then: K drafts pay off while a "
            "round costs less than tau plain steps."
        ]
    if verified_faults(facts):
        return [
            "No K is recommended: the drafter failed flywheel verify, so what verify measured "
            "decides nothing."
        ]
    if not verified["costs"]:
        chosen = ", ".join(map(str, verified["k_by_batch_size"]))
        return [f"K was set by hand (serve.k): {chosen}. No cost was measured."]
    common, by_slice = verified["k_by_batch_size"], verified.get("k_by_slice", {})
    others = [(name, ks) for name, ks in by_slice.items() if ks != common]
    lines = [f"Serve with {_by_batch(common)}."]
    if 0 in common:
        lines.append("K 0: no drafts, since no K was predicted to be faster than plain decoding.")
    lines += [f"Traffic of {short_name(n)} alone: {_by_batch(ks)}." for n, ks in others[:SHOWN]]
    if len(others) > SHOWN:
        lines.append(f"{len(others) - SHOWN} further parts of the traffic have a K of their own.")
    return lines


def _by_batch(ks: list[int]) -> str:
    """[7] -> "K 7"; [7, 7, 4] -> "K by batch size: 7 at 1 to 2, 4 from 3 on"."""
    if len(set(ks)) == 1:
        return f"K {ks[0]}"
    parts, start = [], 1
    for k, same in groupby(ks):
        end = start + len(list(same)) - 1
        span = f"from {start} on" if end == len(ks) else f"at {start}"
        parts.append(f"{k} {span}" + (f" to {end}" if start < end < len(ks) else ""))
        start = end + 1
    return "K by batch size: " + ", ".join(parts)


def served(facts: Facts) -> list[tuple[str, str]]:
    """Speed and text checks of `flywheel verify`."""
    verified = facts.verified
    if verified is None:
        return []
    greedy, reference = verified["greedy"], verified["reference"]
    speeds = [
        (
            f"tokens per second, drafted / plain, {s['concurrency']} at a time",
            f"{s['ratio']:.2f} ({min(s['ratios']):.2f} to {max(s['ratios']):.2f})",
        )
        for s in verified["speeds"]
    ]
    return [
        ("result", "failed" if verified_faults(facts) else "passed"),
        ("tau by vLLM's own counts, drafts after the end of text included", _tau(verified)),
        *speeds,
        ("greedy texts compared with and without the drafter", str(greedy["requests"])),
        ("identical", str(greedy["identical"])),
        ("differing at a near tie", str(greedy["near_ties"])),
        ("differing otherwise", str(greedy["different"])),
        ("requests replayed on the text that was served", str(verified["same_text"]["requests"])),
        ("of these, in the same rounds as replay", str(verified["same_text"]["identical_rounds"])),
        ("requests walked by the reference decoder", str(reference["requests"])),
        ("identical to replay in every round", str(reference["identical"])),
    ]


def _tau(verified: Row) -> str:
    return f"{verified['vllm_mean_acceptance_length']:.3f}"
