"""The first section: the champion, the last window, the fleet, and what needs attention."""

from collections.abc import Callable

from jobs.base.console import visible
from jobs.dataset.queries import FILLED_BY
from jobs.looking.parts import Card, Section, day_of, ends, grid, moment, since, tau
from jobs.looking.sources import Row, Sources
from jobs.reconciling.freezing import frozen, told
from jobs.reconciling.observed import find_fleet, has_fleet, observe
from jobs.reconciling.rollout_rows import MEASURE, PREFIX
from jobs.reporting.facts import ALL
from jobs.reporting.templates import interval, signed
from store import windows
from store.place import first_line

REASON = 300
"""Characters of a reason that are shown."""
STEPS = {
    "traffic": ("traffic", "requests that were captured"),
    "selection": ("selection", "what is learned from"),
    "features": ("feature_index", "hidden states of the target"),
    "acceptance": ("acceptance", "a trained drafter, replayed"),
    "promotions": ("promotions", "a champion"),
}
"""View -> its table, and what it is when it is there, in the order of the loop."""
FAILED = """
select stage, finished_at, ok, summary::json ->> '$.error' as error
from stages
qualify row_number() over (partition by stage order by started_at desc) = 1
order by finished_at desc
"""


def overview(seen: Sources, section: Section) -> None:
    """Facts that could not be read are cards of their own."""
    section.warnings += [f"table {name}: {fault}" for name, fault in seen.damaged.items()]
    made: list[tuple[str, Callable[[Sources, Section], list[Card]]]] = [
        ("champion", _champion),
        ("tau, served", _served),
        ("last window", _window),
        ("fleet", _fleet),
        ("last roll-out", _rollout),
        ("registry", _registry),
        ("commands", _failed),
    ]
    for about, make in made:
        try:
            section.cards += make(seen, section)
        except (OSError, ValueError) as error:
            section.cards.append(Card(about, "cannot be read", first_line(error), bad=True))
    if "promotions" not in seen.damaged and seen.champion is None:
        _first_steps(seen, section)


def _champion(seen: Sources, section: Section) -> list[Card]:
    row = seen.champion
    if row is None:
        return [Card("champion", "none yet", "`flywheel promote` makes one, if the gate passes")]
    more = f"since {since(row['decided_at'], seen.now)}, by {row['who']} ({row['action']})"
    cards = [
        Card("champion", f"version {row['version']}", f"drafter {row['drafter_version']}, {more}")
    ]
    since_then = [r for r in seen.decisions if r["number"] > row["number"]]
    for later in since_then:
        if later["action"] == "incompatible" and later["version"] == row["version"]:
            section.warnings.append(f"the champion does not fit: {_reason(later)}")
    known = [r for r in seen.decisions if r["version"] == row["version"] and tau(r)]
    if known:
        best = known[-1]
        words = (
            f"tokens per round when it was evaluated, 95% interval {interval(ends(best, 'tau'))}"
        )
        if best["gain_tokens_per_round"] is not None:
            words += f"; {signed(best['gain_tokens_per_round'])} over the champion before"
        cards.append(Card("tau, replayed", f"{best['tau_tokens_per_round']:.3f}", words))
    return cards


def _served(seen: Sources, section: Section) -> list[Card]:
    rows = [r for r in seen.ask("tau_by_day", "acceptance") if r["domain"] == ALL]
    champion = seen.champion["drafter_version"] if seen.champion else None
    mine = [r for r in rows if r["drafter_version"] == champion] or rows
    if not mine:
        return []
    row = mine[-1]
    words = f"tokens per round on {day_of(row['day'])} under version {row['version']}; "
    words += f"{row['requests']:,} requests, {row['drafts_per_round']:.1f} drafts per round"
    return [Card("tau, served", f"{row['tau_tokens_per_round']:.3f}", words)]


def _window(seen: Sources, section: Section) -> list[Card]:
    seen.check("windows")
    known = windows.read(seen.aside.table("windows"))
    if not known:
        return [Card("last window", "none yet", "`flywheel retrain` takes the traffic that is new")]
    last = known[-1]
    words = f"began {since(last.whole['started_at'], seen.now)}"
    if running := [name for name, row in last.rows.items() if row["state"] in windows.OPEN]:
        words += f"; at {running[-1]}"
    if last.whole["reason"]:
        words += f"; {visible(last.whole['reason'], REASON)}"
    if last.state == "failed":
        section.warnings.append(f"window {last.number} failed: {last.whole['reason']}")
    return [Card("last window", f"{last.number}: {last.state}", words)]


def _fleet(seen: Sources, section: Section) -> list[Card]:
    # The state of our own fleet is in the user's scratch folder; it is only read.
    if (ice := frozen(seen.cfg)) is not None:
        section.warnings.append(told(ice))
    if not has_fleet(seen.cfg):
        return [Card("fleet", "none known", "`flywheel fleet up`, or set rollout.replicas")]
    found = observe(seen.aside, find_fleet(seen.cfg))
    wanted = seen.champion["drafter_version"] if seen.champion else ""
    mine = [one for one in found if wanted and one.sha256.startswith(wanted)]
    faults = [one.fault for one in found if one.status is None]
    for fault in faults[:3]:
        section.warnings.append(f"a replica does not answer: {fault}")
    others = [f"{one.url}: {one.label}" for one in found]
    fact = f"{len(mine)} of {len(found)} draft with the champion"
    return [Card("fleet", fact, "; ".join(others[:8]))]


def _rollout(seen: Sources, section: Section) -> list[Card]:
    mine = [r for r in seen.decisions if r["action"].startswith(PREFIX)]
    ends_of = [r for r in mine if r["action"] != PREFIX + MEASURE]
    if not ends_of:
        return []
    row = ends_of[-1]
    action = row["action"].removeprefix(PREFIX)
    if action in ("rollback", "fallback"):
        section.warnings.append(f"version {row['version']}: {action}: {_reason(row)}")
    fact = f"version {row['version']}: {action}"
    return [Card("last roll-out", fact, f"{since(row['decided_at'], seen.now)}; {_reason(row)}")]


def _registry(seen: Sources, section: Section) -> list[Card]:
    """No card: only whether it is at odds with the decisions."""
    found, decided = seen.registered, seen.champion
    theirs, ours = found and found.number, decided and decided["version"]
    if theirs != ours:
        section.warnings.append(
            f"the champion of the registry is version {theirs or 'none'}, that of the decisions is "
            f"{ours or 'none'}: an alias or the registry was changed by hand, or a command was "
            "killed; the next `flywheel promote` or `rollback` records what it finds"
        )
    return []


def _failed(seen: Sources, section: Section) -> list[Card]:
    seen.check("stages")
    for row in seen.query(FAILED, "stages"):
        if not row["ok"]:
            why = visible(row["error"] or "see its output", REASON)
            section.warnings.append(
                f"the last `flywheel {row['stage']}` failed ({moment(row['finished_at'])}): {why}"
            )
    return []


def _first_steps(seen: Sources, section: Section) -> None:
    rows, missing = [], []
    for view, (table, meaning) in STEPS.items():
        there = table not in seen.damaged and seen.aside.table(table).version() is not None
        rows.append({"step": meaning, "command": FILLED_BY[view], "there": there})
        missing += [] if there else [FILLED_BY[view]]
    if len(missing) == len(STEPS):
        section.text.append(
            f"Nothing is in {seen.cfg.place()} yet. Run `{missing[0]}` first, or `make demo` for a "
            "finished example; reload this page at any time."
        )
    elif missing:
        section.text.append(f"There is no champion yet. Next: `{missing[0]}`.")
    columns = {"command": "command", "there": "there", "it gives": "step"}
    section.grids.append(grid("The way to a first champion", rows, columns, len(rows)))


def _reason(row: Row) -> str:
    return visible(row["reason"] or "no reason given", REASON)
