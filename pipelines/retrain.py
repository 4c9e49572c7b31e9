"""flywheel retrain [--plan] [retrain.minutes=60] [retrain.fresh=true]

One window of new traffic: regenerate (where the target has changed) -> ingest -> select -> harvest
-> train -> evaluate -> preflight -> verify (where the gate needs measured costs) -> promote ->
rollout (where replicas are known). Training starts from the champion. Rows of the table windows/
say how far a window has come; the same command goes on with one that was interrupted, and does
nothing where no sample is new.
docs/how-to/retrain.md has the states and exit codes.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from datetime import UTC, datetime
from typing import Any

from dflash.identity import target_id
from jobs import (
    evaluate,
    harvest,
    ingest,
    preflight,
    promote,
    regenerate,
    rollout,
    select,
    train,
    verify,
)
from jobs.base.cli import run_as_module
from jobs.base.cluster import cluster
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.base.stage_log import logged
from jobs.promotion.candidate import read_candidate
from jobs.promotion.gate_rules import read_rules
from jobs.proof.kept_results import known_costs
from jobs.reconciling.observed import has_fleet
from jobs.registry.versions import CHAMPION, opened
from jobs.retraining.experience import keep_served_gain
from jobs.retraining.foreign_champion import foreign_champion, mark
from jobs.retraining.new_samples import New, new_since
from jobs.retraining.outcomes import numbers_of, outcome
from jobs.retraining.policy import read_policy
from jobs.retraining.recipe import make_recipe, start_of, trained_with
from jobs.retraining.triggers import look
from store import windows
from store.lease import lease
from store.place import first_line
from store.windows import LEFT, OPEN, WHOLE, Window, Writer

Stage = Callable[[Config], dict[str, Any]]
LEARN: list[tuple[str, Stage]] = [
    ("select", select.run),
    ("harvest", harvest.run),
    ("train", train.run),
    ("evaluate", evaluate.run),
]
DELIVER: list[tuple[str, Stage]] = [
    ("preflight", preflight.run),
    ("verify", verify.run),
    ("promote", promote.run),
    ("rollout", rollout.run),
]
BUSY = 3
"""Exit code: another retrain holds the lease."""


def run(cfg: Config) -> dict[str, Any]:
    """Finish the window that was interrupted, else the next one; returns what came of it.

    Every decision about the window, also against the drafter, is a result. Raises what a stage
    raises: the row of that step has the reason, and the same command runs it again.
    """
    read_policy(cfg.watch.policy)  # a mistake in it is told before hours of work
    with ExitStack() as stack:
        try:
            held = stack.enter_context(lease(cfg.place("leases", "retrain"), wait=0.0))
        except ValueError as error:
            console.print(f"another retrain is running: {error}")
            return {"stage": "retrain", "ok": False, "exit": BUSY, "held_by": str(error)}
        return _Turn(cfg, Writer(cfg.table("windows"), held)).run()


def plan(cfg: Config) -> dict[str, Any]:
    """What `run` would do with what is ingested now, and why; writes nothing."""
    known = windows.read(cfg.table("windows"))
    window, new = windows.unfinished(known), None
    every = [name for name, _ in (*LEARN, *DELIVER)]
    if window is None or _over(cfg, window):
        new = new_since(cfg, target_id(cfg.target_path), known)
        too_few = _too_few(cfg, new)
        does, why = ("skipped", too_few) if too_few else ("runs", f"{new.total} new answer tokens")
        rows = []
        if prompts := len(regenerate.waiting(cfg)):
            rows.append(["regenerate", "runs", f"{prompts} prompts to answer anew"])
            does, why = "runs", f"the answers to them, and {new.total} new answer tokens"
        rows.append(["ingest", "runs", "logs may have grown since the last time"])
        rows += [[name, does, why] for name in every]
        notes = start_of(cfg)[1]
    else:
        why = f"window {window.number} goes on: it is {window.state} {window.whole['reason']}"
        rows = [[name, "runs", why.strip()] for name in every if not window.is_done(name)]
        notes = window.numbers("train").get("notes") or start_of(cfg)[1]
    for row in rows:
        if row[0] == "train":
            row[2] = "; ".join([row[2], *notes])
        if row[1] == "runs" and (needless := _never(cfg, row[0])):
            row[1:] = ["skipped", needless]
    print_table("What would be done now", ["step", "", "why"], rows)
    names = ("step", "does", "why")
    return {
        "stage": "retrain",
        "plan": [dict(zip(names, row, strict=True)) for row in rows],
        "new_tokens": new.tokens if new else {},
    }


class _Turn:
    """One command: a window from where it is to its end."""

    def __init__(self, cfg: Config, writer: Writer):
        self.cfg, self.writer = cfg, writer
        self.known = windows.read(cfg.table("windows"))

    def run(self) -> dict[str, Any]:
        """Go on with a window or begin one; returns the summary."""
        window = windows.unfinished(self.known)
        if window is not None and (why := _over(self.cfg, window)):
            self._close(window, "abandoned", f"it was {window.state}, and {why}")
            window = None
        if window is None:
            window = self._begin()
        else:
            console.print(f"window {window.number} is {window.state}: it goes on")
        if window is None:
            console.print("no sample is new since the last window: nothing to do")
            return {"stage": "retrain", "window": None, "state": "nothing new"}
        if window.state in OPEN:
            self._turn(window)
        return _summary(window)

    def _begin(self) -> Window | None:
        """The window of what is new; None if nothing is."""
        cfg, started = self.cfg, datetime.now(UTC)
        gathered = self._gather()
        new = new_since(cfg, target_id(cfg.target_path), self.known)
        last = self.known[-1] if self.known else None
        if not new.total:
            return None
        if last is not None and last.state == "skipped":
            if last.whole["to_version"] == new.after and _too_few(cfg, new):
                return last  # it was skipped for the same samples
            window = Window(last.number)  # which they all belong to
        else:
            window = Window(last.number + 1 if last else 1)
        if new.note:
            console.print(f"note: {new.note}")
        keep_served_gain(cfg, self.known, self.writer)
        foreign = self._fall_back()
        window.put(
            WHOLE,
            state="running",
            reason="",
            target_id=target_id(cfg.target_path),
            from_version=new.before,
            to_version=new.after,
            captured_from=new.first,
            captured_to=new.last,
            started_at=started,
            numbers=self._numbers(new),
        )
        for name, row in gathered.items():
            window.put(name, **row)
        window.put("ingest", reason="; ".join(filter(None, [new.note, foreign])))
        if why := _too_few(cfg, new):
            self._close(window, "skipped", why)
            return window
        self.writer.write(window)
        return window

    def _gather(self) -> dict[str, dict[str, Any]]:
        """What is there to learn from: prompts of a former target are answered anew, and logs are
        ingested. Rows of the two steps.
        """
        steps: list[tuple[str, Stage]] = [("ingest", ingest.run)]
        if regenerate.waiting(self.cfg):
            steps.insert(0, ("regenerate", regenerate.run))
        rows = {}
        for name, stage in steps:
            started, clock = datetime.now(UTC), time.perf_counter()
            numbers = numbers_of(name, logged(self.cfg, name, stage))
            seconds = time.perf_counter() - clock
            done = {"state": "done", "started_at": started, "seconds": seconds}
            rows[name] = done | {"numbers": numbers}
        return rows

    def _numbers(self, new: New) -> dict[str, Any]:
        """What a window is about, and what the policy saw when it began."""
        registry = opened(self.cfg)
        champion = registry.current(CHAMPION) if registry else None
        fired = [t.name for t in look(self.cfg, read_policy(self.cfg.watch.policy)) if t.fires]
        return {
            "tokens": new.tokens,
            "older": new.older,
            "samples": new.samples,
            "champion": champion.sha256 if champion else "",
            "fired": fired,
            "drifted": [name for name in fired if name.startswith("drift of ")],
        }

    def _fall_back(self) -> str:
        """If the champion is for another target, record it and let the fleet fall back."""
        champion = foreign_champion(self.cfg)
        if champion is None:
            return ""
        reason = mark(self.cfg, champion)
        console.print(f"note: {reason}")
        if has_fleet(self.cfg):
            logged(self.cfg, "rollout", rollout.run)
        return reason

    def _turn(self, window: Window) -> None:
        left = [name for name, _ in LEARN if not window.is_done(name)]
        with cluster(self.cfg) if left else nullcontext():
            for name, stage in LEARN:
                if not window.is_done(name):
                    self._step(window, name, stage)
        for name, stage in DELIVER:
            if not window.is_done(name) and (decided := self._step(window, name, stage)):
                self._close(window, *decided)
                return
        self._close(window, "promoted", "no replica is known: servers take it at their next start")

    def _step(self, window: Window, name: str, stage: Stage) -> tuple[str, str] | None:
        """Run a step; returns what it decides about the window."""
        console.rule(name)
        clock = time.perf_counter()
        try:
            summary = self._run(window, name, stage)
        except Exception as error:
            self._failed(window, name, error, time.perf_counter() - clock)
            raise
        if summary is None:
            return None
        numbers = window.numbers(name) | numbers_of(name, summary)
        seconds = time.perf_counter() - clock
        decided = outcome(window, name, summary)
        waits = decided is not None and decided[0] == "waiting"
        window.put(name, state="waiting" if waits else "done", seconds=seconds, numbers=numbers)
        if decided is None:
            self.writer.write(window)
        return decided

    def _run(self, window: Window, name: str, stage: Stage) -> dict[str, Any] | None:
        """The summary of a stage; None if it is left out."""
        cfg = self._settings(window, name)
        row: dict[str, Any] = {"started_at": datetime.now(UTC), "reason": "", "seconds": 0.0}
        if why := _needless(cfg, name):
            console.print(f"{name} is left out: {why}")
            window.put(name, state="skipped", **row | {"reason": why})
            self.writer.write(window)
            return None
        window.put(name, state="running", **row)
        window.put(WHOLE, state="running")
        self.writer.write(window)
        return logged(cfg, name, stage)

    def _settings(self, window: Window, name: str) -> Config:
        """The settings of a step: what earlier steps of this window have made."""
        cfg = self.cfg
        if "version" in (selected := window.numbers("select")):
            cfg = cfg.override("select", version=selected["version"])
        if name == "train":
            # Its samples are pinned: a run of another window that was left is not this one.
            cfg = cfg.override("train", fresh=True)
            if "settings" not in window.numbers("train"):
                recipe = make_recipe(cfg, window, self.known)
                window.put("train", state="running", numbers=recipe.numbers())
            for note in window.numbers("train")["notes"]:
                console.print(note)
            cfg = trained_with(cfg, window.numbers("train"))
        if folder := window.numbers("train").get("folder"):
            for section in ("evaluate", "preflight", "verify", "promote"):
                cfg = cfg.override(section, drafter=folder)
        return cfg.override("rollout", watch=False)

    def _failed(self, window: Window, name: str, error: Exception, seconds: float) -> None:
        cause = getattr(error, "cause", None)  # Ray wraps a task's error
        why = first_line(cause if isinstance(cause, Exception) else error)
        window.put(name, state="failed", reason=why, seconds=seconds)
        window.put(WHOLE, state="failed", reason=f"{name}: {why}")
        with suppress(OSError, ValueError):  # the error itself says more
            self.writer.write(window)

    def _close(self, window: Window, state: str, reason: str) -> None:
        seconds = sum(row["seconds"] for step, row in window.rows.items() if step != WHOLE)
        window.put(WHOLE, state=state, reason=reason, seconds=seconds)
        self.writer.write(window)
        console.print(f"window {window.number}: {state}: {reason}")


def _too_few(cfg: Config, new: New) -> str:
    if new.total >= cfg.retrain.min_tokens:
        return ""
    return f"too few tokens: {new.total} new ones, retrain.min_tokens is {cfg.retrain.min_tokens}"


def _over(cfg: Config, window: Window) -> str:
    """Why an interrupted window is not gone on with; "" if it is."""
    if cfg.retrain.fresh:
        return "retrain.fresh is set"
    if window.whole["target_id"] != target_id(cfg.target_path):
        return "the target has changed"
    return ""


def _never(cfg: Config, name: str) -> str:
    """Why the settings leave a step out; "" if they do not."""
    if name == "rollout" and not has_fleet(cfg):
        return "no replica is known (rollout.replicas, rollout.dns)"
    if name == "verify" and not read_rules(cfg.promote.gate).speed.required:
        return "the gate needs no measured costs (speed.required)"
    return ""


def _needless(cfg: Config, name: str) -> str:
    """Why a step is left out; "" if it runs. `promote.drafter` is the drafter of the window."""
    why = _never(cfg, name)
    if why or name != "verify":
        return why
    candidate = read_candidate(cfg)
    source = known_costs(cfg, candidate.sha256, candidate.compat)[1]
    return "" if source is None else f"costs are known, as measured with {source['drafter']}"


def _summary(window: Window) -> dict[str, Any]:
    steps = {name: row for name, row in window.rows.items() if name != WHOLE}
    rows = [[n, r["state"], r["seconds"], r["reason"]] for n, r in steps.items()]
    print_table(f"Window {window.number}: {window.state}", ["step", "state", "s", "why"], rows)
    return {
        "stage": "retrain",
        "window": window.number,
        "state": window.state,
        "reason": window.whole["reason"],
        "skipped": window.state in LEFT,
        "steps": {n: {"state": r["state"], "seconds": r["seconds"]} for n, r in steps.items()},
        "tokens": window.whole["numbers"]["tokens"],
        "promoted": window.numbers("promote").get("version"),
    }


if __name__ == "__main__":
    run_as_module("retrain")
