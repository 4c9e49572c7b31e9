"""flywheel rollout [rollout.watch=true] [--plan]

Bring the fleet to the champion: one replica first (the canary), compared with the others on served
acceptance; then all of them, or back to the drafter before. Every command goes on from what the
replicas say and promotions/ has. docs/explanation/rollout.md.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table, short_name
from jobs.reconciling import freezing
from jobs.reconciling.next_steps import Situation
from jobs.reconciling.picture import write_evidence
from jobs.reconciling.reconciler import Busy, Reconciler, reconciling
from jobs.reconciling.three_answers import Verdict


def run(cfg: Config) -> dict[str, Any]:
    """Roll out once, or for ever with `rollout.watch`; returns what came of it.

    `ok`: every replica drafts with the champion that there was at the beginning. Waits
    `rollout.wait` for another roll-out, then holds. Raises ValueError without any replica.
    """
    if cfg.rollout.freeze:
        return _switch(cfg)
    if cfg.rollout.watch:
        return _watch(cfg)
    try:
        with _after_others(cfg) as one:
            return _once(cfg, one)
    except Busy as busy:
        console.print(f"held: {busy}")
        return {"stage": "rollout", "ok": False, "decision": "held", "why": str(busy)}


def plan(cfg: Config) -> dict[str, Any]:
    """What `run` would do now, without doing it."""
    now, steps = Reconciler(cfg).ahead()
    _print_replicas(now)
    rows = [[s.kind, s.url, str(s.drafter) if s.url else "", s.why] for s in steps]
    print_table("What would be done now", ["step", "replica", "drafter", "why"], rows)
    return {
        "stage": "rollout",
        "steps": [{"step": s.kind, "replica": s.url, "why": s.why} for s in steps],
    }


@contextmanager
def _after_others(cfg: Config) -> Iterator[Reconciler]:
    with ExitStack() as stack:
        try:
            one = stack.enter_context(reconciling(cfg))
        except Busy as busy:  # it may be the one that brings what this command was started for
            console.print(f"{busy} (waiting for up to rollout.wait = {cfg.rollout.wait:g} s)")
            one = stack.enter_context(reconciling(cfg, cfg.rollout.wait))
        yield one


def _once(cfg: Config, one: Reconciler) -> dict[str, Any]:
    end, why, now = one.run()
    decision = {"done": "unchanged", "hold": "held", "frozen": "frozen"}[end]
    if "rollback" in one.done:
        decision, why = "rolled back", f"{one.went_back}; {why}"
    elif "advance" in one.done:
        decision = "advanced" if end == "done" else "held"
    elif end == "done" and one.done:
        decision = "brought"
    _print_replicas(now)
    if one.verdict is not None:
        print_verdict(one.verdict)
    console.print(f"{decision}: {why}")
    return {
        "stage": "rollout",
        "ok": end == "done" and decision != "rolled back",
        "decision": decision,
        "why": why,
        "champion": now.champion.number if now.champion else None,
        "rollout": one.rollout,
        "evidence": None if one.rollout is None else write_evidence(cfg, one.rollout),
        "replicas": {o.url: o.label for o in now.seen},
        "faults": list(one.given_up.values()),
        "verdict": one.verdict.summary() if one.verdict else None,
    }


def _watch(cfg: Config) -> dict[str, Any]:
    """Follow the registry until Ctrl-C. A fault is told once, and tried again."""
    told, found = "", {"stage": "rollout", "ok": True}
    while True:
        try:
            with reconciling(cfg) as one:
                end, why, now = one.run()
                if one.done or f"{end}: {why}" != told:
                    told = f"{end}: {why}"
                    _print_replicas(now)
                    console.print(told)
                    if one.rollout is not None:
                        write_evidence(cfg, one.rollout)
            time.sleep(cfg.rollout.poll)
        except KeyboardInterrupt:
            return found
        except (ValueError, OSError) as error:
            if str(error) != told:
                console.print(f"note: {error}; it is tried again")
            told = str(error)
            time.sleep(cfg.rollout.poll)


def _switch(cfg: Config) -> dict[str, Any]:
    told = "not frozen any more: roll-outs go on"
    if cfg.rollout.freeze == "on":
        told = freezing.told(freezing.freeze(cfg, cfg.rollout.reason))
    else:
        freezing.thaw(cfg)
    console.print(told)
    return {"stage": "rollout", "decision": f"freeze {cfg.rollout.freeze}", "why": told}


def _print_replicas(now: Situation) -> None:
    wanted = now.champion
    title = f"Champion: version {wanted.number}/{wanted.sha256[:12]}" if wanted else "No champion"
    rows = [[o.url, o.label, o.fault or (o.status or {}).get("fault") or ""] for o in now.seen]
    print_table(title, ["replica", "drafts with", "fault"], rows)


def print_verdict(verdict: Verdict) -> None:
    """The table of every comparison."""
    rows = [
        [short_name(j.name), *j.conversations, f"{j.accepted[0]}/{j.offered[0]}"]
        + [f"{j.accepted[1]}/{j.offered[1]}", _percent(j.difference)]
        + [f"{_percent(j.low)} .. {_percent(j.high)}", f"-{j.tolerance:.0%}", j.answer]
        for j in verdict.judged
    ]
    columns = ["slice", "conversations: canary", "rest", "accepted/offered: canary", "rest"]
    columns += ["tokens per round", "interval", "tolerance", "answer"]
    print_table(f"{verdict.answers[0]} answers of the canary", columns, rows)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


if __name__ == "__main__":
    run_as_module("rollout")
