"""What the summary of a stage means for its window."""

from typing import Any

from store.ids import drafter_version
from store.windows import Window

Numbers = dict[str, Any]
Outcome = tuple[str, str]
"""(state of the window, why)"""

KEPT = {
    "regenerate": ("prompts", "answers", "finish_reasons", "left_out"),
    "ingest": ("logs", "records", "accepted", "samples"),
    "select": ("version", "samples", "tokens"),
    "harvest": (),
    "train": ("name", "folder", "step", "seconds", "best_val_tau", "best_step", "samples"),
    "preflight": ("ok", "reused"),
    "verify": ("ok", "tau_served", "speedup", "faults"),
    "promote": ("decision", "version", "previous", "reasons", "drafter_sha256"),
    "rollout": ("decision", "why", "champion", "rollout"),
}
"""Step -> keys of its summary that its row keeps. The table stages has all of it."""


def numbers_of(step: str, summary: Numbers) -> Numbers:
    """What the row of a step keeps."""
    if step == "evaluate":
        return _evaluated(summary)
    return {name: summary[name] for name in KEPT[step] if name in summary}


def _evaluated(summary: Numbers) -> Numbers:
    found = {
        "drafter": drafter_version(summary["drafter_sha256"]),
        "tau": summary["tau"]["pooled"],
        "tau_ci": summary["tau"]["ci"],
        "conversations": summary["conversations"],
        "baseline": None,
        "gain": summary["tau"]["pooled"] - 1,
    }
    interval = summary["tau"]["ci"]
    ends = interval and [end - 1 for end in interval]
    if baseline := summary["baseline"]:
        found |= {
            "baseline": drafter_version(baseline["drafter_sha256"]),
            "baseline_tau": baseline["tau"]["pooled"],
            "gain": baseline["delta"],
        }
        ends = baseline["delta_ci"]
    return found | {"gain_low": ends and ends[0], "gain_high": ends and ends[1]}


def outcome(window: Window, step: str, summary: Numbers) -> Outcome | None:
    """What a step decides about its window; None: the next step follows."""
    if step in ("preflight", "verify") and not summary["ok"]:
        failed = [c["name"] for c in summary.get("checks", []) if c["status"] == "fail"]
        return "refused", f"{step}: {'; '.join(summary.get('faults') or failed)}"
    if step == "promote":
        return _promoted(window, summary)
    if step == "rollout":
        return _rolled_out(window, summary)
    return None


def _promoted(window: Window, summary: Numbers) -> Outcome | None:
    decision = summary["decision"]
    if decision in ("held", "refused"):
        return decision, f"gate: {'; '.join(summary['reasons'])}"
    before = window.whole["numbers"]["champion"]
    if decision == "unchanged" and summary["drafter_sha256"] == before:
        return "unchanged", "training found no better weights than the champion's"
    return None  # promoted now, or by a command that was killed before it could say so


def _rolled_out(window: Window, summary: Numbers) -> Outcome:
    if summary["decision"] == "rolled back":
        return "rolled back", f"rollout: {summary['why']}"
    if summary["decision"] in ("held", "frozen"):
        return "waiting", f"rollout: {summary['why']}"
    champion, ours = summary["champion"], window.numbers("promote").get("version")
    if champion != ours:  # another roll-out, or somebody, was faster
        return "rolled back", f"rollout: the champion is version {champion} now, not {ours}"
    return "promoted", f"rollout: {summary['why']}"
