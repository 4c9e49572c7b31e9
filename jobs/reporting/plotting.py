"""The plots of the report, each a function from numbers to an inline SVG.

They are drawn small (4.2 inches wide) with readable type: a page scales them up on a screen, and
they stay legible on a phone. Replayed and served rows, and the baseline, look the same everywhere.
Colors are CSS variables, with the drawn color as default, so that a page can have a dark theme.
Names come from outside: none is read as a formula, as a color or as matplotlib markup.
"""

import io
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from statistics import mean
from typing import Any

import matplotlib
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jobs.base.console import visible

INK, PAGE, FAINT = "#1a1a1b", "#fffffe", "#bbbbbc"
BLUE, RED, GRAY, GREEN = "#0072b2", "#d55e00", "#767677", "#009e73"
THEME = {
    INK: "currentColor",
    PAGE: f"var(--page, {PAGE})",
    FAINT: f"var(--faint, {FAINT})",
    BLUE: f"var(--blue, {BLUE})",
    RED: f"var(--red, {RED})",
    GRAY: f"var(--gray, {GRAY})",
    GREEN: f"var(--green, {GREEN})",
}
COLOR = re.compile("|".join(THEME))
STYLE: dict[str, dict[str, Any]] = {
    "replay": {"color": BLUE, "marker": "o", "linestyle": "-"},
    "served": {"color": RED, "marker": "s", "linestyle": "--"},
    "baseline": {"color": GRAY, "marker": "D", "linestyle": ":"},
}
RC: dict[Any, Any] = {
    "font.size": 10,
    "font.family": "sans-serif",
    "text.parse_math": False,  # a $ in a name is an ordinary character
    "svg.fonttype": "none",  # text stays text: searchable, and in the reader's own font
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.markersize": 5,
}
LONGEST = 20
"""Most characters of a slice's name that fit beside a plot."""

Interval = list[float] | None
Point = tuple[str, float, Interval]
"""Name, value, interval."""
Look = tuple[int, float, float, float]
"""Answers so far, estimate, low and high end."""
Timed = tuple[datetime, float, Interval]
"""When, value, interval."""


def lines_by_position(lines: Mapping[str, tuple[Sequence[float], Sequence[Interval]]]) -> str:
    """Share of rounds in which draft k was accepted, with intervals; the keys of `lines` are those
    of STYLE.
    """
    with _style("positions"):
        figure, axes = _figure()
        for i, (name, (values, intervals)) in enumerate(lines.items()):
            shift = (i - (len(lines) - 1) / 2) * 0.12
            places = [k + shift for k in range(1, len(values) + 1)]
            axes.plot(places, values, label=name, mfc=PAGE, **STYLE[name])
            for place, ci in zip(places, intervals, strict=True):
                if ci:
                    axes.plot([place, place], ci, color=STYLE[name]["color"], linewidth=1)
        longest = max(len(values) for values, _ in lines.values())
        axes.set_xticks(_ticks(range(1, longest + 1)))
        axes.set(xlabel="draft position", ylabel="share of rounds accepted", ylim=(0, 1.02))
        axes.legend()
        return _svg(figure)


def bars_by_domain(taus: Mapping[str, Mapping[str, float]]) -> str:
    """Acceptance length by domain; `taus[origin][domain]`."""
    domains = list(dict.fromkeys(domain for values in taus.values() for domain in values))
    with _style("domains"):
        height = 0.8 / len(taus)
        figure, axes = _figure(0.9 + 0.4 * len(domains) * max(len(taus), 1.5) / 1.5)
        for i, (origin, values) in enumerate(taus.items()):
            rows = [d + (i - (len(taus) - 1) / 2) * height for d in range(len(domains))]
            lengths = [values.get(domain, float("nan")) for domain in domains]
            color = STYLE[origin]["color"]
            bars = axes.barh(rows, lengths, height * 0.9, label=origin, color=color)
            axes.bar_label(bars, fmt="%.2f", padding=2)
        _no_drafter(axes)
        axes.set_yticks(range(len(domains)), [_short(domain) for domain in domains])
        axes.invert_yaxis()
        axes.set_xlabel("tau, tokens per round")
        axes.margins(x=0.15)
        _legend_above(axes, len(taus))
        return _svg(figure)


def waterfall(endings: Sequence[tuple[str, float]]) -> str:
    """(how a round ended, share of rounds) in order. Every bar starts where the one before ends."""
    with _style("endings"):
        figure, axes = _figure(0.7 + 0.26 * len(endings))
        left = 1.0
        for row, (name, share) in enumerate(endings):
            color = GREEN if name.startswith("all ") else BLUE if "draft" in name else GRAY
            axes.barh(row, share, 0.7, left=left - share, color=color)
            inside = left > 0.5
            place, align = (left - share - 0.015, "right") if inside else (left + 0.015, "left")
            axes.text(place, row, f"{share:.1%}", va="center", ha=align)
            left -= share
            if row + 1 < len(endings):
                axes.plot([left, left], [row - 0.35, row + 1.35], color=FAINT, linewidth=0.8)
        axes.set_yticks(range(len(endings)), [name for name, _ in endings])
        axes.set(xlabel="share of rounds", xlim=(0, 1.0))
        axes.invert_yaxis()
        return _svg(figure)


def forest(
    groups: Mapping[str, Sequence[Point]], label: str, at: float, baseline: Mapping[str, Any]
) -> str:
    """Values with intervals, one row each, below the name of their group; a vertical line at `at`.

    `baseline[group][name]`: the value of the other drafter, if there is one.
    """
    rows = list(_rows(groups))
    with _style(label):
        figure, axes = _figure(0.7 + 0.24 * len(rows))
        for y, (group, point) in enumerate(rows):
            if point is None:
                continue
            name, value, ci = point
            other = baseline.get(group, {}).get(name)
            if other is not None:
                axes.plot(other, y, **STYLE["baseline"] | {"linestyle": "none"})
            if ci:
                axes.plot(ci, [y, y], color=BLUE, linewidth=1.5)
            axes.plot(value, y, "o", color=BLUE, mfc=BLUE if ci else PAGE)
        axes.axvline(at, color=GRAY, linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(rows)), [_short(p[0] if p else group) for group, p in rows])
        for tick, (_, point) in zip(axes.get_yticklabels(), rows, strict=True):
            tick.set_fontweight("normal" if point else "bold")
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel(label)
        return _svg(figure)


def lines_by_k(taus: Mapping[str, Mapping[int, float]], model: Mapping[int, float]) -> str:
    """Acceptance length against the number of draft tokens; keys of `taus` are those of STYLE.
    `model`: tau by K if every draft is accepted with one chance alpha.
    """
    with _style("k"):
        figure, axes = _figure()
        axes.plot(list(model), list(model.values()), color=FAINT, label="one chance, fitted")
        for name, values in taus.items():
            style = STYLE[name] | ({} if len(values) > 1 else {"linestyle": "none"})
            ks = sorted(values)
            axes.plot(ks, [values[k] for k in ks], label=name, mfc=PAGE, **style)
        axes.set_xticks(_ticks(sorted({k for values in taus.values() for k in values})))
        axes.set(xlabel="K, draft tokens per round", ylabel="tau, tokens per round")
        axes.set_ylim(bottom=1)
        axes.legend()
        return _svg(figure)


def speedups(
    predicted: Mapping[int, Mapping[int, float]], measured: Mapping[int, tuple[int, float]]
) -> str:
    """Tokens per second relative to no drafter: predicted for every K (a line per batch size), and
    measured with the chosen K (`measured[batch]`: K, ratio; filled markers).
    """
    with _style("speed"):
        figure, axes = _figure()
        for (batch, values), color, marker in zip(
            predicted.items(), (BLUE, RED, GREEN), "os^", strict=False
        ):
            label = f"{batch} at a time"
            ks = list(values)
            axes.plot(ks, list(values.values()), marker=marker, mfc=PAGE, color=color, label=label)
            if batch in measured:
                axes.plot(*measured[batch], marker, color=color, markersize=8)
        axes.axhline(1, color=GRAY, linewidth=0.8, linestyle=":")
        axes.set_xticks(_ticks(sorted({k for values in predicted.values() for k in values})))
        axes.set(xlabel="K, draft tokens per round", ylabel="speed, times no drafter")
        _legend_above(axes, len(predicted))
        return _svg(figure)


def training_curves(
    losses: Sequence[tuple[int, float]], taus: Mapping[str, Sequence[tuple[int, float]]]
) -> str:
    """Above: loss of each step (thin) and its running mean. Below: replayed val tau by domain."""
    with _style("training"):
        figure = Figure(figsize=(4.2, 4.2), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        steps, values = zip(*losses, strict=True)
        above.plot(steps, values, color=FAINT, linewidth=0.7)
        above.plot(steps, _running_mean(values), color=BLUE)
        above.set_ylabel("training loss")
        for i, (name, points) in enumerate(taus.items()):
            at, tau = zip(*points, strict=True)
            below.plot(at, tau, "-", marker="os^Dv"[i % 5], mfc=PAGE, label=_entry(name))
        below.axhline(1, color=GRAY, linewidth=0.8, linestyle=":")
        below.set(xlabel="step", ylabel="replayed tau, val")
        if taus:
            below.legend()
        return _svg(figure)


def lines_over_time(
    kind: str, lines: Mapping[str, Sequence[Timed]], changes: Sequence[datetime]
) -> str:
    """Acceptance length over time, with intervals; at most 5 lines. `changes`: when the
    champion changed, as dotted lines. `kind` tells pictures of one page apart.
    """
    with _style(kind):
        figure, axes = _figure(3.0)
        for (name, points), color, marker in zip(
            lines.items(), (BLUE, RED, GREEN, GRAY, INK), "os^Dv", strict=False
        ):
            times, values, intervals = zip(*points, strict=True)
            axes.plot(times, values, marker=marker, mfc=PAGE, color=color, label=_entry(name))
            for time, ci in zip(times, intervals, strict=True):
                if ci:
                    axes.plot([time, time], ci, color=color, linewidth=1, alpha=0.6)
        every = [time for points in lines.values() for time, _, _ in points]
        axes.set_xlim(min(every) - timedelta(hours=18), max(every) + timedelta(hours=18))
        for time in changes:
            axes.axvline(time, color=GRAY, linewidth=0.8, linestyle=":")
        locator = AutoDateLocator(minticks=2, maxticks=5)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        axes.set_ylabel("tau, tokens per round")
        axes.set_ylim(bottom=1)
        _legend_above(axes, 2)
        return _svg(figure)


def sequential_intervals(
    title: str, panels: Mapping[str, Sequence[Look]], tolerances: Mapping[str, float]
) -> str:
    """How the intervals of a roll-out narrowed, one panel for each slice: relative differences over
    the answers of the canary, with the tolerance as a dotted line. A slice without looks says why.
    """
    with _style("rollout"):
        figure = Figure(figsize=(4.2, 0.6 + 1.7 * len(panels)), layout="constrained")
        for axes, (name, looks) in zip(
            figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0],
            panels.items(),
            strict=True,
        ):
            axes.set_title(_short(name), loc="left", fontsize=10)
            if not looks:
                said = "too few conversations for an interval"
                axes.text(0.5, 0.5, said, transform=axes.transAxes, ha="center", va="center")
                axes.set_yticks([])
                continue
            answers, middle, low, high = zip(*looks, strict=True)
            axes.fill_between(answers, low, high, color=BLUE, alpha=0.25, linewidth=0)
            axes.vlines(answers, low, high, color=BLUE, alpha=0.5, linewidth=1)
            axes.plot(answers, middle, "o-", color=BLUE, markersize=3)
            axes.axhline(0, color=GRAY, linewidth=0.8)
            axes.axhline(-tolerances[name], color=RED, linewidth=1, linestyle=":")
            reach = max(0.15, 2.5 * tolerances[name], 1.3 * max(map(abs, middle)))
            axes.set_ylim(-min(reach, 1.0), reach)  # no loss is larger than all of it
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:+.0%}")
        axes.set_xlabel("answers of the canary")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        figure.supylabel("tokens per round against the rest", fontsize=10)
        figure.suptitle(textwrap.fill(visible(title, 200), 50), fontsize=10)
        return _svg(figure)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean of up to 20 values around each."""
    return [mean(values[max(0, i - 10) : i + 10]) for i in range(len(values))]


def _rows(groups: Mapping[str, Sequence[Point]]) -> Iterator[tuple[str, Point | None]]:
    for group, points in groups.items():
        yield group, None
        for point in points:
            yield group, point


def _ticks(ks: Sequence[int]) -> list[int]:
    """At most 8 of `ks`: with more, labels of two digits touch on a phone."""
    return list(ks[:: 1 + (len(ks) - 1) // 8])


def _short(name: str) -> str:
    return visible(name, LONGEST)


def _entry(name: str) -> str:
    """A name for a legend; matplotlib leaves out names that begin with an underscore."""
    return f" {_short(name)}" if name.startswith("_") else _short(name)


def _legend_above(axes: Any, columns: int) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns)


@contextmanager
def _style(name: str) -> Iterator[None]:
    """Our settings of matplotlib. `name` keeps the ids inside one SVG distinct from other SVGs."""
    settings: dict[Any, Any] = {**RC, "svg.hashsalt": name}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # Matplotlib's fonts only measure the text here; a reader's own fonts show it.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def _figure(height: float = 2.7) -> tuple[Figure, Any]:
    figure = Figure(figsize=(4.2, height), layout="constrained")
    return figure, figure.add_subplot()


def _no_drafter(axes: Any) -> None:
    axes.axvline(1, color=GRAY, linewidth=0.8, linestyle=":")


def _svg(figure: Figure) -> str:
    """The figure without XML prologue and date: the same numbers always give the same bytes."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
    text = stream.getvalue()
    text = re.sub(r"<[^>]*>", _themed, text[text.index("<svg") :])
    return text.strip()


def _themed(tag: re.Match[str]) -> str:
    """A tag with its colors replaced by the page's; text between tags is not touched."""
    return COLOR.sub(lambda color: THEME[color[0]], tag[0])
