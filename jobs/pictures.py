"""The pictures of the report, each a function from numbers to an inline SVG.

Drawn small (4.5 inches wide) with readable type: a page scales them up on a screen and keeps them
legible on a phone. Replay, served and decoded rows have the same colour and marker everywhere.
"""

import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from statistics import mean
from typing import Any

import matplotlib
from matplotlib.figure import Figure

STYLE: dict[str, dict[str, Any]] = {
    "replay": {"color": "#0072B2", "marker": "o"},
    "served": {"color": "#D55E00", "marker": "s"},
    "decode": {"color": "#009E73", "marker": "^"},
}
RC: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text stays text: searchable, and in the reader's own font
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "legend.frameon": False,
}
OTHER: dict[str, Any] = {"color": "#767676", "marker": "D"}


def lines_by_position(rates: Mapping[str, Sequence[float]]) -> str:
    """Share of rounds in which draft k was accepted; `rates` by origin, one value per k."""
    with _style("positions"):
        figure, axes = _figure()
        for origin, values in rates.items():
            style = STYLE.get(origin, OTHER)
            dashes = "--" if origin == "served" else "-"
            axes.plot(range(1, len(values) + 1), values, dashes, label=origin, mfc="white", **style)
        longest = max(len(values) for values in rates.values())
        axes.set_xticks(range(1, longest + 1))
        axes.set(xlabel="draft position", ylabel="share of rounds accepted", ylim=(0, 1))
        axes.legend()
        return _svg(figure)


def bars_by_domain(taus: Mapping[str, Mapping[str, float]]) -> str:
    """Acceptance length by domain; `taus[origin][domain]`."""
    domains = list(dict.fromkeys(domain for values in taus.values() for domain in values))
    with _style("domains"):
        height = 0.8 / len(taus)
        figure, axes = _figure(0.7 + 0.35 * len(domains) * max(len(taus), 1.5))
        for i, (origin, values) in enumerate(taus.items()):
            rows = [d + (i - (len(taus) - 1) / 2) * height for d in range(len(domains))]
            lengths = [values.get(domain, float("nan")) for domain in domains]
            color = STYLE.get(origin, OTHER)["color"]
            bars = axes.barh(rows, lengths, height * 0.9, label=origin, color=color)
            axes.bar_label(bars, fmt="%.2f", padding=2)
        _no_drafter(axes)
        axes.set_yticks(range(len(domains)), domains)
        axes.invert_yaxis()
        axes.set_xlabel("tau, tokens per round")
        axes.margins(x=0.15)
        if len(taus) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(taus))
        return _svg(figure)


def bars_per_round(shares: Mapping[str, Mapping[int, float]], k: int) -> str:
    """Share of rounds that accepted exactly n drafts; `shares[origin][n]`."""
    with _style("rounds"):
        figure, axes = _figure()
        width = 0.8 / len(shares)
        for i, (origin, values) in enumerate(shares.items()):
            places = [n + (i - (len(shares) - 1) / 2) * width for n in range(k + 1)]
            heights = [values.get(n, 0.0) for n in range(k + 1)]
            color = STYLE.get(origin, OTHER)["color"]
            axes.bar(places, heights, width * 0.9, label=origin, color=color)
        axes.set_xticks(range(k + 1))
        axes.set(xlabel="drafts accepted in a round", ylabel="share of rounds")
        axes.legend()
        return _svg(figure)


def lines_by_k(taus: Mapping[str, Mapping[int, float]]) -> str:
    """Acceptance length against the number of draft tokens; `taus[origin][k]`."""
    with _style("k"):
        figure, axes = _figure()
        for origin, values in taus.items():
            style = STYLE.get(origin, OTHER)
            kind = "-" if len(values) > 1 else "none"
            ks = sorted(values)
            axes.plot(
                ks, [values[k] for k in ks], label=origin, linestyle=kind, mfc="white", **style
            )
        axes.set_xticks(sorted({k for values in taus.values() for k in values}))
        axes.set(xlabel="K, draft tokens per round", ylabel="tau, tokens per round")
        axes.set_ylim(bottom=1)
        axes.legend()
        return _svg(figure)


def champion_against(pairs: Sequence[tuple[str, float, float]]) -> str:
    """(domain, champion's tau, challenger's tau) on the same samples, one row each."""
    with _style("champion"):
        figure, axes = _figure(1.0 + 0.35 * len(pairs))
        for row, (_, champion, challenger) in enumerate(pairs):
            axes.plot([champion, challenger], [row, row], color="#bbbbbb", zorder=1)
            axes.annotate(
                f"{challenger - champion:+.2f}",
                (max(champion, challenger), row),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
            )
        rows = range(len(pairs))
        axes.scatter([p[1] for p in pairs], rows, color="#767676", marker="D", label="champion")
        axes.scatter([p[2] for p in pairs], rows, color="#0072B2", marker="o", label="challenger")
        axes.set_yticks(rows, [p[0] for p in pairs])
        axes.set_ylim(len(pairs) - 0.5, -0.5)
        axes.set_xlabel("tau, tokens per round")
        axes.margins(x=0.25)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
        return _svg(figure)


def training_curves(
    losses: Sequence[tuple[int, float]], taus: Mapping[str, Sequence[tuple[int, float]]]
) -> str:
    """Loss of each step, thin, with its running mean; and replayed val tau by domain, below."""
    with _style("training"):
        figure = Figure(figsize=(4.5, 4.2), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        steps, values = zip(*losses, strict=True)
        above.plot(steps, values, color="#bbbbbb", linewidth=0.7)
        above.plot(steps, _running_mean(values), color="#0072B2")
        above.set_ylabel("training loss")
        for i, (name, points) in enumerate(taus.items()):
            at, tau = zip(*points, strict=True)
            below.plot(at, tau, "-", marker="os^Dv"[i % 5], mfc="white", label=name)
        below.axhline(1, color="#767676", linewidth=0.8, linestyle=":")
        below.set(xlabel="step", ylabel="replayed tau, val")
        if taus:
            below.legend()
        return _svg(figure)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean of up to 20 values around each."""
    return [mean(values[max(0, i - 10) : i + 10]) for i in range(len(values))]


def _style(name: str) -> AbstractContextManager:
    """Our settings; the name keeps the ids inside one picture apart from those of another."""
    settings: dict[Any, Any] = {**RC, "svg.hashsalt": name}
    return matplotlib.rc_context(settings)


def _figure(height: float = 2.8) -> tuple[Figure, Any]:
    figure = Figure(figsize=(4.5, height), layout="constrained")
    return figure, figure.add_subplot()


def _no_drafter(axes: Any) -> None:
    axes.axvline(1, color="#767676", linewidth=0.8, linestyle=":")


def _svg(figure: Figure) -> str:
    """The figure without XML prologue and without a date: the same numbers, the same bytes."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]
