"""Parts of the traffic that are looked at apart: by domain, language, length, place, settings."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from dflash.acceptance import tau

Row = dict[str, Any]
Walks = list[list[int]]
"""Per request the accepted drafts of each round, as in dflash.acceptance."""

LENGTHS = (128, 512, 2048, 8192)
PLACES = (32, 128, 512)
TEMPERATURES = (0.0, 0.5, 1.0)


def slices(rows: Sequence[Row], accepted: Walks) -> dict[str, dict[str, Walks]]:
    """{dimension: {slice: walks}}: the walks of all requests, empty where a request is outside.

    A dimension in which all rounds fall into one slice says nothing and is left out, except the
    domain. By place, a request is cut: a round belongs where its anchor stands in the answer.
    """
    found = {
        "domain": _by_request([row["domain"] for row in rows], accepted),
        "language": _by_request([row["language"] or "unknown" for row in rows], accepted),
        "prompt tokens": _by_request(
            [_bucket(len(row["prompt_ids"]), LENGTHS) for row in rows], accepted
        ),
        "place in the answer": _by_place(accepted),
        "thinking": _by_request([_flag(row["thinking"]) for row in rows], accepted),
        "temperature": _by_request([_heat(row["temperature"]) for row in rows], accepted),
    }
    return {name: parts for name, parts in found.items() if len(parts) > 1 or name == "domain"}


def taus_by_slice(rows: Sequence[Row], walks: Mapping[int, Walks]) -> dict[str, dict[int, float]]:
    """{"domain tickets": {K: tau}, ...}: the slices that have rounds at every K."""
    found: dict[str, dict[int, float]] = {}
    for k, accepted in walks.items():
        for dimension, parts in slices(rows, accepted).items():
            for name, part in parts.items():
                found.setdefault(f"{dimension} {name}", {})[k] = tau(part)
    return {name: taus for name, taus in found.items() if len(taus) == len(walks)}


def _by_request(labels: Sequence[str], accepted: Walks) -> dict[str, Walks]:
    names = dict.fromkeys(label for label, rounds in zip(labels, accepted, strict=True) if rounds)
    return {
        name: [r if label == name else [] for label, r in zip(labels, accepted, strict=True)]
        for name in sorted(names, key=_order)
    }


def _by_place(accepted: Walks) -> dict[str, Walks]:
    found: dict[str, Walks] = {}
    for i, rounds in enumerate(accepted):
        anchors = accumulate((count + 1 for count in rounds[:-1]), initial=0) if rounds else ()
        for anchor, count in zip(anchors, rounds, strict=True):
            name = _bucket(anchor + 1, PLACES)
            found.setdefault(name, [[] for _ in accepted])[i].append(count)
    return {name: found[name] for name in sorted(found, key=_order)}


def _bucket(value: int, bounds: Sequence[int]) -> str:
    """130 within (128, 512) -> "129..512"."""
    low = 1
    for bound in bounds:
        if value <= bound:
            return f"{low}..{bound}"
        low = bound + 1
    return f"{low}.."


def _heat(temperature: float | None) -> str:
    """0, a bucket that includes its upper end, or unknown (the log did not say)."""
    if temperature is None:
        return "unknown"
    if temperature == 0:
        return "0"
    below = 0.0
    for bound in TEMPERATURES[1:]:
        if temperature <= bound:
            return f"{below:g}..{bound:g}"
        below = bound
    return f"{below:g}.."


def _flag(value: bool | None) -> str:
    return "unknown" if value is None else "on" if value else "off"


def _order(name: str) -> tuple[float, str]:
    """Buckets by their lower end, everything else by name behind them."""
    start = name.split("..")[0]
    return (float(start), name) if ".." in name or name == "0" else (float("inf"), name)
