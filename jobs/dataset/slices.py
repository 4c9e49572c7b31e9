"""Slices of the traffic that are measured separately: by domain, language, prompt length, place in
the answer, and request settings.

Clients choose domains and languages, so there may be any number of them. All are computed and kept;
`largest` says which ones a table, a plot or a log shows.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from dflash.acceptance import tau
from jobs.base.console import short_name

Row = dict[str, Any]
Walks = list[list[int]]
"""For each request, the number of accepted drafts in each round, as in dflash.acceptance."""

LENGTHS = (128, 512, 2048, 8192)
PLACES = (32, 128, 512)
TEMPERATURES = (0.0, 0.5, 1.0)
SHOWN = 30
"""Slices of one dimension that are shown to people."""
BUCKET = re.compile(r"(\d+(?:\.\d+)?)(?:\.\.(?:\d+(?:\.\d+)?)?)?", re.ASCII)
"""Names of buckets, as `_bucket` and `_heat` write them."""


def slices(rows: Sequence[Row], accepted: Walks) -> dict[str, dict[str, Walks]]:
    """{dimension: {slice: walks}}: the walks of all requests, empty where a request is outside.

    A dimension in which all rounds fall into one slice says nothing and is left out, except the
    domain. Slices by place divide a request: a round belongs to the place of its anchor in the
    answer.
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
        "shaped": _by_request([_shaped(row["shaped"]) for row in rows], accepted),
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


def largest(sizes: Mapping[str, float], most: int = SHOWN) -> list[str]:
    """The names of the `most` largest of {name: size}, in the order of the mapping."""
    kept = set(sorted(sizes, key=lambda name: -sizes[name])[:most])
    return [name for name in sizes if name in kept]


def largest_rows(counts: Mapping[str, Sequence[int]]) -> list[list[Any]]:
    """Table rows [name, *counts] of the largest names, and one last row that sums up all others."""
    kept = largest({name: sum(numbers) for name, numbers in counts.items()})
    rows: list[list[Any]] = [[short_name(name), *counts[name]] for name in kept]
    others = [numbers for name, numbers in counts.items() if name not in kept]
    if others:
        rows.append([f"({len(others)} smaller ones)", *map(sum, zip(*others, strict=True))])
    return rows


def _by_request(labels: Sequence[str], accepted: Walks) -> dict[str, Walks]:
    found: dict[str, Walks] = {}
    empty: list[int] = []
    for i, (label, rounds) in enumerate(zip(labels, accepted, strict=True)):
        if rounds:
            found.setdefault(label, [empty] * len(accepted))[i] = rounds
    return {name: found[name] for name in _ordered(found)}


def _by_place(accepted: Walks) -> dict[str, Walks]:
    found: dict[str, Walks] = {}
    for i, rounds in enumerate(accepted):
        anchors = accumulate((count + 1 for count in rounds[:-1]), initial=0) if rounds else ()
        for anchor, count in zip(anchors, rounds, strict=True):
            name = _bucket(anchor + 1, PLACES)
            if name not in found:
                found[name] = [[] for _ in accepted]
            found[name][i].append(count)
    return {name: found[name] for name in _ordered(found)}


def _bucket(value: int, bounds: Sequence[int]) -> str:
    """The bucket of a value from 1 on: 130 with bounds (128, 512) -> "129..512"."""
    low = 1
    for bound in bounds:
        if value <= bound:
            return f"{low}..{bound}"
        low = bound + 1
    return f"{low}.."


def _heat(temperature: float | None) -> str:
    """The bucket of a temperature: 0, or one that includes its upper end; unknown for None."""
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


def _shaped(names: str | None) -> str:
    """Settings besides temperature that shaped an answer; "plain" for none, "unknown" for None."""
    return "unknown" if names is None else names or "plain"


def _ordered(names: Iterable[str]) -> list[str]:
    """Buckets by their lower end, then all other names in order."""

    def place(name: str) -> tuple[float, str]:
        bucket = BUCKET.fullmatch(name)
        return (float(bucket[1]) if bucket else float("inf"), name)

    return sorted(names, key=place)


def domains(rows: list[Row]) -> list[str]:
    """Domains that have a round, sorted."""
    return sorted({row["domain"] for row in rows if len(row["output_ids"]) > 1})


def pick(rows: list[Row], accepted: list[list[int]], domain: str) -> list[list[int]]:
    """The walks of the requests of one domain."""
    return [a for row, a in zip(rows, accepted, strict=True) if row["domain"] == domain]
