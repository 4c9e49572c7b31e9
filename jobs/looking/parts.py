"""What a section of the page consists of, and how values are written in it. Times are UTC."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any

from jobs.reporting.templates import interval, signed

Row = dict[str, Any]
Read = str | Callable[[Row], Any]
NONE = "-"
NUMBER = re.compile(r"[+-]?\d(?!\d\d\d-\d\d-)")


@dataclass(frozen=True, slots=True)
class Card:
    """One fact: what it is about, the fact, and more about it. bad: it could not be read."""

    about: str
    fact: str
    more: str = ""
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: columns as (name, whether its cells are numbers), and text cells."""

    caption: str
    columns: list[tuple[str, bool]]
    rows: list[list[str]]
    note: str = ""


@dataclass
class Section:
    """A part of the page. `fault`: why it could not be read; `warnings` are shown at the top."""

    name: str
    title: str
    text: list[str] = field(default_factory=list)
    cards: list[Card] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)  # caption, SVG
    warnings: list[str] = field(default_factory=list)
    fault: str = ""


def grid(
    caption: str, rows: Sequence[Row], columns: Mapping[str, Read], most: int, note: str = ""
) -> Grid:
    """The first `most` rows; a column is a key of a row or a function of it. A column whose values
    are all numbers (with a unit or an interval), and no days, aligns right.
    """
    found = [[_text(row, read) for read in columns.values()] for row in rows[:most]]
    kinds = [all(_is_number(cell) for cell in cells) for cells in zip(*found, strict=True)]
    kinds = kinds or [False] * len(columns)
    if len(rows) > most:
        note = f"{note} {len(rows) - most} more rows are not shown.".strip()
    return Grid(caption, list(zip(columns, kinds, strict=True)), found, note)


def _text(row: Row, read: Read) -> str:
    value = row[read] if isinstance(read, str) else read(row)
    if value is None or value == "":
        return NONE
    if isinstance(value, datetime):
        return moment(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _is_number(cell: str) -> bool:
    return cell == NONE or bool(NUMBER.match(cell))


def moment(when: datetime) -> str:
    """2026-12-01 18:56."""
    return f"{when:%Y-%m-%d %H:%M}"


def ago(when: datetime, now: datetime) -> str:
    """Time since then, in its largest unit: "6 h ago"."""
    seconds = (now - when).total_seconds()
    if seconds < -60:
        return "dated in the future"
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size or (unit != "days" and seconds >= size):
            return f"{seconds / size:.0f} {unit} ago"
    return "now"


def since(when: datetime, now: datetime) -> str:
    """2026-12-01 18:56, 6 h ago."""
    return f"{moment(when)}, {ago(when, now)}"


def day_of(when: date) -> str:
    """2026-12-01."""
    return f"{when:%Y-%m-%d}"


def ends(row: Row, name: str) -> list[float] | None:
    """The interval of a value in an answer: its columns NAME_low and NAME_high."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return None if low is None or high is None else [low, high]


def tau(row: Row, value: str = "tau_tokens_per_round", name: str = "tau") -> str | None:
    """3.431 (2.683 to 3.889); without the interval where there is none."""
    return with_ends(row[value], ends(row, name), "{:.3f}".format, interval)


def gain(row: Row) -> str | None:
    """+0.210 (0.100 to 0.320), in tokens per round."""
    return with_ends(row["gain_tokens_per_round"], ends(row, "gain"), signed, interval)


def share(row: Row, value: str, name: str = "") -> str | None:
    """+4.0% (-1.0% to +9.0%); `name` is that of the interval."""
    found = ends(row, name) if name else None
    return with_ends(row[value], found, "{:+.1%}".format, lambda two: between(*two))


def with_ends(
    value: float | None,
    two: list[float] | None,
    one: Callable[[float], str],
    both: Callable[[list[float]], str | None],
) -> str | None:
    """A value with its interval in brackets, if there is one; None for no value."""
    if value is None:
        return None
    return one(value) if two is None else f"{one(value)} ({both(two)})"


def between(low: float | None, high: float | None) -> str | None:
    """-1.0% to +9.0%; None without an interval."""
    return None if low is None or high is None else f"{low:+.1%} to {high:+.1%}"
