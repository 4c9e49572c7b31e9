"""What an evaluation reports: tau with intervals, by slice and by position, and gains."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dflash.acceptance import (
    fit_alpha,
    geometric_tau,
    num_rounds,
    positions,
    tau,
    tau_macro,
    tau_weighted,
)
from dflash.checkpoint import drafter_sha256
from jobs.base.config import Config
from jobs.dataset.slices import Row, Walks, slices
from jobs.evaluation.drafters import (
    Side,
)
from jobs.evaluation.intervals import Estimate, Resamples

EFFECTS = (0.01, 0.02, 0.05)
"""Relative gains of tau for which the number of conversations that detect them is reported."""

RARE = 0.05
"""Domains with a smaller share of the rounds are judged together: labels come from clients, and
with hundreds of them no single loss could be established any more. So at most 21 parts are judged.
"""


def describe(draws: Resamples, rows: Sequence[Row], accepted: Walks, k: int) -> dict[str, Any]:
    """Tau of one drafter: pooled, weighted by repeats, macro, by position and slice; `ci` are 95 %
    intervals or None.
    """
    found = slices(rows, accepted)
    counts = [row["repeat_count"] for row in rows]
    return {
        "pooled": tau(accepted),
        "weighted": tau_weighted(accepted, counts),
        "macro": tau_macro(accepted),
        "ci": draws.tau(accepted, k).interval,
        "positions": positions(accepted, k),
        "positions_ci": [draws.position(accepted, i).interval for i in range(1, k + 1)],
        "domains": {name: tau(walks) for name, walks in found["domain"].items()},
        "weighted_domains": {n: tau_weighted(w, counts) for n, w in found["domain"].items()},
        "positions_by_domain": {n: positions(walks, k) for n, walks in found["domain"].items()},
        "slices": {
            dimension: {name: _slice(draws, walks, k) for name, walks in parts.items()}
            for dimension, parts in found.items()
        },
    }


def _slice(draws: Resamples, walks: Walks, k: int) -> dict[str, Any]:
    found = draws.tau(walks, k)
    return {
        "tau": found.value,
        "ci": found.interval,
        "rounds": num_rounds(walks),
        "conversations": found.conversations,
    }


def gain(
    draws: Resamples, rows: Sequence[Row], ours: Walks, theirs: Walks, ks: tuple[int, int]
) -> dict[str, Any]:
    """Our tau minus theirs on the same requests. `ks`: drafts per round, ours and theirs."""
    most, fewest = max(ks), min(ks)
    pooled = draws.tau_gain(ours, theirs, most)
    before, after = slices(rows, theirs), slices(rows, ours)
    return {
        "delta": pooled.value,
        "delta_ci": pooled.interval,
        **power(pooled, tau(theirs)),
        "delta_positions": [
            _delta(draws.position_gain(ours, theirs, i)) for i in range(1, fewest + 1)
        ],
        "delta_slices": {
            dimension: {
                name: _delta(draws.tau_gain(walks, before[dimension][name], most))
                for name, walks in parts.items()
                if name in before.get(dimension, {})
            }
            for dimension, parts in after.items()
        },
    }


def _delta(found: Estimate) -> dict[str, Any]:
    return {"delta": found.value, "ci": found.interval}


def judged_domains(
    draws: Resamples, rows: Sequence[Row], ours: Walks, theirs: Walks, most: int
) -> list[dict[str, Any]]:
    """The gain in every domain, in the form that the gate judges (`judged`): the rare ones together
    as one, whose `name` is empty and whose `members` are their names. `most`: the larger K.
    """
    sizes: Counter[str] = Counter()
    for row, walk in zip(rows, theirs, strict=True):
        sizes[row["domain"]] += len(walk)
    shares = {name: size / sizes.total() for name, size in sorted(sizes.items()) if size}
    parts = {name: [name] for name, share in shares.items() if share >= RARE}
    if rare := [name for name in shares if name not in parts]:
        parts[""] = rare
    found = []
    for name, members in parts.items():
        inside = [row["domain"] in members for row in rows]
        mine, before = (
            [walk if keep else [] for walk, keep in zip(walks, inside, strict=True)]
            for walks in (ours, theirs)
        )
        one = judged(draws.tau_gain(mine, before, most), tau(before), len(parts))
        share = sum(shares[member] for member in members)
        found.append({"name": name, "members": members, "share": share, **one})
    return found


def judged(found: Estimate, before: float, tests: int) -> dict[str, Any]:
    """A gain over `before` (a tau), as one of `tests` that are judged together: its 95 % interval
    alone (`ci`) and corrected for all of them, and the loss that the latter shows in 4 of 5 cases.
    """
    corrected, detectable = found.among(tests)
    return {
        "before": before,
        "delta": found.value,
        "ci": found.interval,
        "ci_corrected": corrected,
        "tests": tests,
        "detectable": detectable,
        "conversations": found.conversations,
    }


def power(found: Estimate, before: float) -> dict[str, Any]:
    """What these conversations can detect. `detectable`: the tau gain that they find in 4 of 5
    cases. `conversations_for`: how many such conversations a gain of each size in EFFECTS needs.
    `before`: the tau that these gains are relative to.
    """
    return {
        "conversations": found.conversations,
        "detectable": found.detectable,
        "conversations_for": {
            f"{share:.0%}": found.conversations_for(share * before) for share in EFFECTS
        },
    }


def by_k(walks: dict[int, Walks]) -> dict[str, Any]:
    """Tau at every K, beside the model in which each draft is accepted with one chance alpha."""
    measured = {k: tau(walks[k]) for k in sorted(walks)}
    alpha = fit_alpha(measured)
    model = {k: geometric_tau(alpha, k) for k in measured}
    misfit = {k: measured[k] - model[k] for k in measured}
    return {"tau_by_k": measured, "alpha": {"fit": alpha, "tau": model, "misfit": misfit}}


def compare(
    cfg: Config, rows: list[Row], sides: Sequence[Side], walks: Sequence[Walks], sets: int = 0
) -> dict[str, Any]:
    """Tau of the first side and, if there is a second, the paired gain over it as `baseline`. Its
    `judged` has the parts that the gate looks at: the domains, or the whole of one of `sets`.
    """
    draws = Resamples([row["conversation_id"] for row in rows], cfg.evaluate.bootstrap)
    found = {
        "samples": len(rows),
        "conversations": draws.size,
        "rounds": num_rounds(walks[0]),
        "tau": describe(draws, rows, walks[0], sides[0].k),
        "baseline": None,
    }
    if len(sides) > 1:
        other = sides[1]
        ks = (sides[0].k, other.k)
        if sets:
            whole = draws.tau_gain(walks[0], walks[1], max(ks))
            parts = [{"name": "", **judged(whole, tau(walks[1]), sets)}]
        else:
            parts = judged_domains(draws, rows, walks[0], walks[1], max(ks))
        found["baseline"] = {
            "version": other.version,
            "drafter": other.folder.name,
            "drafter_sha256": drafter_sha256(other.folder),
            "tau": describe(draws, rows, walks[1], other.k),
            **gain(draws, rows, walks[0], walks[1], ks),
            "judged": parts,
        }
    return found
