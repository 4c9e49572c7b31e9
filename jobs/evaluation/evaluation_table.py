"""What `flywheel evaluate` shows: tau by slice and by K, gains, and warnings."""

from typing import Any

from dflash.drafter_config import head_name
from jobs.base.console import console, print_table, short_name
from jobs.dataset.slices import largest

ENOUGH = 0.98
"""Share of the answers' tokens that should be in the draft vocabulary; below it, a warning."""


def show(evaluation: dict[str, Any]) -> None:
    """Print the tables and warnings of one evaluation."""
    measured = evaluation["tau"]
    lines = [
        ["pooled", measured["pooled"], _words(measured["ci"])],
        ["weighted (by repeats in traffic)", measured["weighted"], ""],
        ["macro (mean of requests)", measured["macro"], ""],
    ]
    for dimension, parts in measured["slices"].items():
        kept = largest({name: part["rounds"] for name, part in parts.items()})
        for n in kept:
            part = parts[n]
            lines.append([f"{dimension} {short_name(n)}", part["tau"], _words(part["ci"])])
        if len(kept) < len(parts):
            lines.append([f"{dimension}: {len(parts) - len(kept)} smaller ones", None, ""])
    what = f"{evaluation['drafter']} ({head_name(evaluation['compat'])})"
    title = f"Replay of {what} on {evaluation['split']}, K = {evaluation['k']}"
    print_table(title, ["slice", "tau", "95 % interval"], lines)
    found = evaluation["leaking"]
    if found["leaking"]:
        console.print(
            f"{found['leaking']} of {found['samples']} samples share their text with "
            "training samples: tau is too high for new traffic",
            style="yellow",
        )
    if evaluation["draftable"] < ENOUGH:
        console.print(
            f"only {evaluation['draftable']:.1%} of the answers' tokens are in the draft "
            "vocabulary, which caps tau: train a new drafter with a larger drafter.draft_vocab",
            style="yellow",
        )
    alpha = evaluation["alpha"]
    print_table(
        f"Tau by K, and a model with one acceptance chance, {alpha['fit']:.3f}, for every draft",
        ["K", "tau", "model", "misfit"],
        [[k, t, alpha["tau"][k], alpha["misfit"][k]] for k, t in evaluation["tau_by_k"].items()],
    )
    compared = {f"on {evaluation['split']}": evaluation} | evaluation["regression"]
    for name, found in evaluation["regression"].items():
        console.print(f"{name}: tau {found['tau']['pooled']:.3f} ({_words(found['tau']['ci'])})")
    for name, found in compared.items():
        if found["baseline"]:
            _print_gain(name, found["baseline"])


def _print_gain(name: str, baseline: dict[str, Any]) -> None:
    needed = ", ".join(f"{n}: {c}" for n, c in baseline["conversations_for"].items() if c)
    console.print(
        f"gain over {baseline['drafter']}, {name}: {baseline['delta']:+.3f} "
        f"({_words(baseline['delta_ci'])}) on {baseline['conversations']} conversations; "
        f"conversations needed to detect a gain, by its size: {needed or 'unknown'}"
    )


def _words(ci: list[float] | None) -> str:
    return "too few conversations" if ci is None else f"{ci[0]:.3f} .. {ci[1]:.3f}"
