"""The other sections: acceptance, canary, champions, windows, time to retrain, data, commands."""

from collections.abc import Callable
from datetime import UTC, datetime, time

from jobs.base.console import short_name, visible
from jobs.dataset.slices import largest
from jobs.looking import parts
from jobs.looking.overview import REASON, overview
from jobs.looking.parts import Section, day_of, grid, moment
from jobs.looking.sources import Row, Sources
from jobs.reconciling.picture import looks
from jobs.reconciling.rollout_rows import MEASURE, PREFIX, rows_of_rollout
from jobs.reporting import plotting
from jobs.reporting.facts import ALL
from jobs.retraining.policy import read_policy
from jobs.retraining.triggers import as_rows, look
from store import promotions, windows

MOST, MOST_LINES = 20, 5
"""Rows of a table, and lines of a picture."""
LATELY = """
select stage, started_at, epoch(finished_at - started_at) / 60 as minutes, ok, who
from stages
order by started_at desc
limit 12
"""


def acceptance(seen: Sources, section: Section) -> None:
    """Served tau by day, and the acceptance curve of the champion."""
    rows = seen.ask("tau_by_day", "acceptance")
    if rows:
        target = rows[-1]["target_id"]
        _served(seen, section, [row for row in rows if row["target_id"] == target])
    else:
        section.text.append(
            "No production is known yet: `flywheel ingest` reads it from the logs of servers that "
            "capture."
        )
    if "promotions" not in seen.damaged and seen.champion:
        _measured(seen, section, seen.champion["drafter_version"])


def _served(seen: Sources, section: Section, rows: list[Row]) -> None:
    decisions = [] if "promotions" in seen.damaged else seen.decisions
    moves = [row for row in decisions if row["action"] in promotions.MOVES]
    first = rows[0]["day"]
    marks = [r["decided_at"] for r in moves if r["decided_at"].date() >= first]
    versions, domains = {}, {}
    for row in rows:
        kept = versions if row["domain"] == ALL else domains
        name = f"version {row['version']}" if row["domain"] == ALL else row["domain"]
        noon = datetime.combine(row["day"], time(12), UTC)
        point = (noon, row["tau_tokens_per_round"], parts.ends(row, "tau"))
        if point[1] is not None:
            kept.setdefault(name, []).append(point)
    newest = dict([*versions.items()][-MOST_LINES:])
    sizes = {d: sum(r["rounds"] for r in rows if r["domain"] == d) for d in domains}
    most = {name: domains[name] for name in largest(sizes, MOST_LINES)}
    for name, lines, by in (("versions", newest, "version"), ("domains", most, "domain")):
        if len({when for points in lines.values() for when, _, _ in points}) > 1:
            caption = f"Tokens per round of production by day and {by}, with 95% intervals."
            caption += " Dotted: the champion changed." if marks else ""
            section.pictures.append((caption, plotting.lines_over_time(name, lines, marks)))
    last = rows[-1]["day"]
    today = sorted((r for r in rows if r["day"] == last), key=lambda r: -r["rounds"])
    columns = {
        "domain": lambda r: short_name(r["domain"]),
        "version": "version",
        "tau (95%)": parts.tau,
        "drafts per round": lambda r: f"{r['drafts_per_round'] or 0:.1f}",
        "requests": "requests",
        "rounds": "rounds",
    }
    note = (
        "K falls with the load, and tau with K: look at drafts per round before you compare days."
    )
    section.grids.append(grid(f"Production on {day_of(last)}", today, columns, MOST, note))


def _measured(seen: Sources, section: Section, drafter: str) -> None:
    """Greedy requests at the largest K, as the commands measured them."""
    rows = seen.ask("acceptance_by_position", "acceptance")
    greedy = [r for r in rows if r["drafter_version"] == drafter and r["temperature"] == 0]
    if not greedy:
        return
    k, target = max(r["k"] for r in greedy), greedy[-1]["target_id"]
    curves = {}
    for row in greedy:
        if row["k"] == k and row["target_id"] == target and row["origin"] in plotting.STYLE:
            curves.setdefault(row["origin"], []).append(row["accept_rate"])
    lines = {name: (rates, [None] * len(rates)) for name, rates in curves.items()}
    if lines:
        caption = f"The champion's acceptance by position, held-out greedy requests, K = {k}."
        section.pictures.append((caption, plotting.lines_by_position(lines)))
    found = [
        r
        for r in seen.ask("tau_by_domain_and_version", "acceptance")
        if (r["drafter_version"], r["target_id"], r["k"]) == (drafter, target, k)
        and r["temperature"] == 0
    ]
    found.sort(key=lambda r: (r["domain"] != ALL, -r["rounds"]))
    columns = {
        "domain": lambda r: short_name(r["domain"]),
        "origin": "origin",
        "tau (95%)": parts.tau,
        "requests": "requests",
        "rounds": "rounds",
    }
    caption = f"The champion on held-out greedy requests, K = {k}"
    section.grids.append(grid(caption, found, columns, MOST))


def canary(seen: Sources, section: Section) -> None:
    """The latest roll-out, as it compared its canary with the rest."""
    rows = seen.ask("canary_vs_rest", "promotions")
    if not rows:
        section.text.append("No roll-out has compared a canary with other replicas yet.")
        return
    number = max(row["rollout"] for row in rows)
    last = [row for row in rows if row["rollout"] == number]
    one = last[0]
    section.text.append(
        f"Roll-out {number} of version {one['version']}: {one['state']}, "
        f"{moment(one['decided_at'])}. Canary: {short_name(one['canary'] or 'not known')}."
    )
    columns = {
        "domain": lambda r: short_name(r["domain"]),
        "against the rest": lambda r: parts.share(r, "difference"),
        "interval": lambda r: parts.between(r["low"], r["high"]),
        "may lose": lambda r: None if r["tolerance"] is None else f"{r['tolerance']:.1%}",
        "answer": "answer",
        "conversations, canary": "canary_conversations",
        "rest": "rest_conversations",
    }
    note = "Tokens per round relative to the other replicas, at the same positions and times."
    section.grids.append(grid("Canary against the rest", last, columns, MOST, note))
    panels, tolerances = looks(rows_of_rollout(seen.aside, number))
    if any(panels.values()):
        title = f"version {one['version']}, roll-out {number}"
        svg = plotting.sequential_intervals(title, panels, tolerances)
        section.pictures.append(("How the interval narrowed with the canary's answers.", svg))


def champions(seen: Sources, section: Section) -> None:
    """Every decision but measurements, the newest first."""
    rows = [row for row in seen.decisions if row["action"] != PREFIX + MEASURE]
    if not rows:
        section.text.append("No decision yet: `flywheel promote` makes the first.")
        return
    columns = {
        "when": "decided_at",
        "action": "action",
        "version": "version",
        "drafter": "drafter_version",
        "tau (95%)": parts.tau,
        "gain (95%)": parts.gain,
        "K by batch size": "k_by_batch_size",
        "who": "who",
        "why": lambda r: visible(r["reason"] or "", REASON),
    }
    note = "`flywheel history` has all, and which drafter came from which."
    section.grids.append(grid("The newest first", rows[::-1], columns, MOST, note))


def retraining(seen: Sources, section: Section) -> None:
    """What windows gained, and the steps of the last."""
    rows = seen.ask("gain_of_windows", "windows", "acceptance")
    if not rows:
        section.text.append("No window yet: `flywheel retrain` takes the traffic that is new.")
        return
    columns = {
        "window": "window",
        "state": "state",
        "new answer tokens": "new_answer_tokens",
        "predicted gain (95%)": lambda r: parts.share(r, "predicted_gain", "predicted"),
        "served gain": lambda r: parts.share(r, "served_gain"),
        "requests": "requests_after",
        "why": lambda r: visible(r["why"] or "", REASON),
    }
    note = "Gains are shares of the tokens per round of the drafter before."
    section.grids.append(grid("The newest first", rows[::-1], columns, MOST, note))
    last = windows.read(seen.aside.table("windows"))[-1]
    steps = {
        "step": "step",
        "state": "state",
        "began": "started_at",
        "minutes": lambda r: f"{(r['seconds'] or 0) / 60:.1f}",
        "why": lambda r: visible(r["reason"] or "", REASON),
    }
    section.grids.append(grid(f"Steps of window {last.number}", [*last.rows.values()], steps, MOST))


def triggers(seen: Sources, section: Section) -> None:
    """What `flywheel watch` would see now."""
    seen.check("traffic", "windows", "acceptance")
    if seen.aside.table("traffic").version() is None:
        section.text.append("There is no traffic yet.")
        return
    seen.registered  # noqa: B018 (the registry is copied, or says why not)
    found = look(seen.aside, read_policy(seen.cfg.watch.policy))
    section.warnings += [
        f"time to retrain: {one.name}, {one.value}: {one.why}" for one in found if one.fires
    ]
    fired = sum(one.fires for one in found)
    section.text.append(f"{fired} of {len(found)} triggers fire." if fired else "No trigger fires.")
    columns = {
        "trigger": "name",
        "sees": "value",
        "limit": "limit",
        "fires": "fires",
        "why": lambda r: visible(r["why"], REASON),
    }
    section.grids.append(grid("Triggers of the policy", as_rows(found), columns, MOST))


def data(seen: Sources, section: Section) -> None:
    """What was captured, and what takes space."""
    rows = seen.ask("storage")
    broken = [
        {"kind": "table", "name": f"{name} (cannot be read)"}
        | dict.fromkeys(("files", "rows", "tokens", "gib", "newest"))
        for name in seen.damaged
    ]
    columns = {
        "kind": "kind",
        "name": "name",
        "size": lambda r: None if r["gib"] is None else _size(r["gib"] * 2**30),
        "rows": "rows",
        "files": "files",
        "tokens": "tokens",
        "newest": "newest",
    }
    if rows or broken:
        section.grids.append(grid("What takes space", broken + rows, columns, MOST))
    else:
        section.text.append("No table and no features yet.")
    if not {"logs", "acceptance"} & set(seen.damaged):
        _coverage(seen, section)


def _coverage(seen: Sources, section: Section) -> None:
    rows = seen.ask("capture_coverage", "logs", "acceptance")
    columns = {
        "ingested on": lambda r: day_of(r["day"]),
        "logs": "logs",
        "size": lambda r: _size((r["mib"] or 0) * 2**20),
        "records": "records",
        "used": "used",
        "not used": "not_used",
        "rejected": "rejected",
        "with rounds": lambda r: None if r["rounds_share"] is None else f"{r['rounds_share']:.0%}",
    }
    if rows:
        note = "`flywheel sql rejected_records` says why records were rejected."
        section.grids.append(grid("What was captured", rows[::-1], columns, 10, note))


def commands(seen: Sources, section: Section) -> None:
    """What was run here lately."""
    seen.check("stages")
    rows = seen.query(LATELY, "stages")
    columns = {
        "command": "stage",
        "began": "started_at",
        "minutes": lambda r: None if r["minutes"] is None else f"{r['minutes']:.1f}",
        "ok": lambda r: "yes" if r["ok"] else "failed",
        "who": "who",
    }
    if rows:
        section.grids.append(grid("The newest first", rows, columns, MOST))
    else:
        section.text.append("No command has been run here yet.")


def _size(size: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= 0.1 * factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size / 2**10:,.1f} KiB"


SECTIONS: dict[str, tuple[str, Callable[[Sources, Section], None]]] = {
    "now": ("Now", overview),
    "acceptance": ("Acceptance over time", acceptance),
    "canary": ("Canary", canary),
    "champions": ("Champions and decisions", champions),
    "windows": ("Windows of retraining", retraining),
    "triggers": ("Is it time to retrain?", triggers),
    "data": ("Data", data),
    "commands": ("Commands", commands),
}
"""In the order of the page: name -> title, and what makes it."""
