"""The table of `flywheel methods`, as it is printed and as it is on the page."""

from typing import Any

from jobs.base.console import short_name

Row = dict[str, Any]
MOST = 8
"""Most domains with their own column: the first ones. The kept result has all."""


def columns(result: Row) -> list[str]:
    """Titles of the columns. Seconds are those from request to answer."""
    none = result["methods"][0]
    concurrencies = [one["concurrency"] for one in none["speeds"]]
    return [
        "method",
        "settings",
        "tau",
        *(f"tau, {short_name(name)}" for name in list(none["tau"]["domains"])[:MOST]),
        *(f"tokens/s at {c}, of none" for c in concurrencies),
        *(f"seconds at {c}: median, p95" for c in concurrencies),
        "text: same, near tie, different",
    ]


def lines(result: Row) -> list[list[Any]]:
    """One line per method, with cells as in `columns`, or why it was not measured."""
    width = len(columns(result))
    return [table_line(row, width) for row in result["methods"]]


def table_line(row: Row, width: int) -> list[Any]:
    """The cells of one method."""
    if not row["available"]:
        return [row["method"], f"not available: {row['reason']}", *[None] * (width - 2)]
    taus, text, speeds = row["tau"], row.get("greedy"), row["speeds"]
    return [
        row["method"],
        settings_text(row["settings"]),
        taus["pooled"],
        *list(taus["domains"].values())[:MOST],
        *(f"{s['ratio']:.2f} ({min(s['ratios']):.2f}..{max(s['ratios']):.2f})" for s in speeds),
        *(f"{s['latency']['median']:.2f}, {s['latency']['p95']:.2f}" for s in speeds),
        f"{text['identical']}, {text['near_ties']}, {text['different']}" if text else None,
    ]


def settings_text(settings: Row) -> str:
    """Settings in words: {"k": [7, 3], "prompt_lookup_max": 4} -> k 7, 3; prompt_lookup_max 4."""
    lists = {name: ", ".join(map(str, v)) for name, v in settings.items() if isinstance(v, list)}
    return "; ".join(f"{name} {value}" for name, value in (settings | lists).items())
