"""Which samples are fit to learn from: the checks of harvest, and its message if too many fail."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash.agreement import evidence
from dflash.target_model import Features

Row = dict[str, Any]

TOO_LONG, KILLED = "too_long", "killed"
REASONS = {
    "length": (
        "the engine gave features for another number of tokens",
        "try harvest.backend=transformers",
    ),
    "not_finite": (
        "features are not finite, in bfloat16 at the latest",
        "try target.dtype=float32; if it stays, the target's weights are damaged",
    ),
    "constant": (
        "features are zero or the same at all positions",
        "the engine does not give hidden states for this model: try harvest.backend=transformers",
    ),
    TOO_LONG: (
        "prompt and answer fill the context of the engine",
        "harvest with harvest.backend=transformers, which has no such limit",
    ),
    KILLED: (
        "the engine ended twice while it had their shard",
        "if memory ran out, lower harvest.batch_tokens; `flywheel harvest` tries them again",
    ),
    "other_model": (
        "the target did not write this answer",
        "point target.path at the folder that answered; look for a gateway that falls back to "
        "another model, an adapter, or another revision or template",
    ),
}
"""Key -> (what was found, what to do)."""
BY_ENGINE = ("length", "not_finite", "constant", TOO_LONG)
"""Reasons that may lie in the engine: with another backend or dtype the sample may pass."""
UNMENTIONED = "or a penalty, a bias or a JSON mode that the log does not mention"
TYPICAL_TEMPERATURE = 1.0  # of servers, for a log that names none


@dataclass(frozen=True)
class Fault:
    """Why a sample is set aside: a key of REASONS, and the numbers that led to it."""

    reason: str
    numbers: dict[str, Any] = field(default_factory=dict)


def screen(row: Row, features: Features, head: Tensor) -> Fault | None:
    """What is wrong with the features [T, n_taps * H] of a TRAFFIC row; None: nothing.

    Needs prompt_ids, output_ids, temperature and shaped of the row. Whether the target wrote the
    answer is not tested if a penalty, a bias or a grammar shaped it, too (row["shaped"]).
    """
    num_tokens = len(row["prompt_ids"]) + len(row["output_ids"])
    lengths = {len(features.taps), len(features.last)}
    if lengths != {num_tokens}:
        return Fault("length", {"features": len(features.taps), "tokens": num_tokens})
    stored = features.taps.to(torch.bfloat16).float()
    bad = ~(stored.isfinite().all(-1) & features.last.isfinite().all(-1))
    if bool(bad.any()):
        return Fault("not_finite", {"positions": num_tokens, "wrong": int(bad.sum())})
    zero = stored.square().mean(-1) < 1e-12
    if bool(zero.any()) or float(stored.std(0).max()) == 0.0:
        return Fault("constant", {"positions": num_tokens, "wrong": int(zero.sum()) or num_tokens})
    return None if row["shaped"] else _authorship(row, features.last, head)


def too_long(row: Row, room: float) -> Fault | None:
    """The fault of a TRAFFIC row with more tokens than the `room` of the engine; None: it fits."""
    tokens = len(row["prompt_ids"]) + len(row["output_ids"])
    return Fault(TOO_LONG, {"tokens": tokens, "room": room}) if tokens > room else None


def _authorship(row: Row, last: Tensor, head: Tensor) -> Fault | None:
    first, recorded = len(row["prompt_ids"]), torch.tensor(row["output_ids"])
    temperature = row["temperature"]
    found = evidence(
        last[first - 1 : first - 1 + len(recorded)],  # position p - 1 predicts the token at p
        head,
        recorded,
        TYPICAL_TEMPERATURE if temperature is None else temperature,
    )
    if found.ok:
        return None
    numbers: dict[str, Any] = {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in asdict(found).items()
    }
    numbers["temperature"] = temperature
    return Fault("other_model", numbers | ({"note": UNMENTIONED} if row["shaped"] is None else {}))


def is_settled(aside: Row, engine: dict[str, str]) -> bool:
    """Whether a SET_ASIDE row also holds for this engine (`backend` and `dtype`): then the sample
    is not tried again. What ended an engine may have been the memory of that day.
    """
    if aside["reason"] == KILLED:
        return False
    return aside["reason"] not in BY_ENGINE or all(aside[name] == engine[name] for name in engine)


def too_many(aside: list[Row], total: int, limit: float) -> str:
    """The error message: how many failed, the most frequent reason, an example, what to do."""
    [(reason, count)] = Counter(row["reason"] for row in aside).most_common(1)
    what, fix = REASONS[reason]
    example = min((row for row in aside if row["reason"] == reason), key=lambda r: r["sample_id"])
    return (
        f"{len(aside)} of {total} samples were set aside ({len(aside) / total:.1%}, established "
        f"above harvest.max_reject_rate {limit:.1%}); mostly {reason} ({count}): {what}, for "
        f"instance {example['sample_id']} of domain {example['domain']!r}: {example['detail']}. "
        f"{fix[0].upper()}{fix[1:]}; all of them: SQL view set_aside. The features of the others "
        "are published; raise harvest.max_reject_rate to go on with them"
    )
