"""One process that brings the fleet to the champion, step by step, under a lease.

It keeps nothing in memory that it could not read again: what replicas say, the rows in promotions/
and the kept answers are all it goes by. So it may be killed at any point.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from jobs.base.config import Config
from jobs.base.console import console
from jobs.promotion.going_back import NothingEarlier, go_back
from jobs.reconciling import freezing
from jobs.reconciling import rollout_rows as rows
from jobs.reconciling.carrying_out import CannotServe, Died, bring
from jobs.reconciling.kept_answers import KeptAnswers, read_feeds
from jobs.reconciling.next_steps import (
    NONE,
    Named,
    Situation,
    Step,
    former_of,
    next_steps,
)
from jobs.reconciling.observed import Fleet, find_fleet, observe
from jobs.reconciling.required_traffic import (
    find_evaluation,
    judged_domains,
    print_required,
    required,
)
from jobs.reconciling.three_answers import Verdict, judge
from jobs.registry.versions import CHAMPION, Registry, Version
from jobs.tracking.mlflow_client import sqlite_file
from serving.replica_client import ReplicaFault, Unreachable
from store import promotions
from store.lease import Lease, lease

MORE = 1.25
"""A measurement is recorded when the canary has this many times the answers of the last one."""
DEATHS = 2
"""A replica that dies so often of one drafter cannot serve it; once, it may have been killed."""
NO_HISTORY = rows.History(None, "", False, None, None)


class Busy(ValueError):
    """Another roll-out is running."""


@contextmanager
def reconciling(cfg: Config, wait: float = 3.0) -> Iterator["Reconciler"]:
    """Be the only process, on any host, that rolls out.

    Raises Busy naming the other one if it is still at work after `wait` seconds.
    """
    find_fleet(cfg)  # without one, nothing is written
    with ExitStack() as stack:
        try:
            held = stack.enter_context(lease(cfg.place("leases", "rollout"), wait))
        except ValueError as error:
            raise Busy(f"another roll-out is running: {error}") from error
        yield Reconciler(cfg, held)


class Reconciler:
    """Brings the fleet to the champion. Without a lease it only looks (`situation`)."""

    def __init__(self, cfg: Config, held: Lease | None = None):
        self.cfg, self.held = cfg, held
        file = sqlite_file(cfg)
        # Without its file nothing was ever registered; opening a registry would create it.
        self.registry = None if file is not None and not file.exists() else Registry(cfg)
        self.given_up: dict[str, str] = {}
        self.deaths: Counter[tuple[str, str]] = Counter()  # of replica and drafter
        self.done: list[str] = []
        self.went_back = ""  # why
        self.rollout: int | None = None
        self.verdict: Verdict | None = None
        self.kept: KeptAnswers | None = None
        self.faults: list[str] = []

    def situation(self, with_canary: bool = True) -> Situation:
        """What is wanted, what is recorded, and what the replicas say now."""
        cfg, champion, floor = self.cfg, None, None
        self.fleet = find_fleet(cfg)
        if self.registry is not None:
            champion = self.registry.current(CHAMPION)
        if self.registry is not None and cfg.rollout.floor != "none":
            floor = self.registry.get(cfg.rollout.floor)
            if floor is None:
                raise ValueError(
                    f"rollout.floor = {cfg.rollout.floor}: {cfg.mlflow.model} has no such version"
                )
        return Situation(
            champion=champion,
            history=rows.history(cfg, champion) if champion else NO_HISTORY,
            seen=observe(cfg, self.fleet),
            floor=floor,
            with_canary=with_canary,
            orphan=None if champion else _orphan(cfg),
            given_up=list(self.given_up),
        )

    def ahead(self) -> tuple[Situation, list[Step]]:
        """The situation, and what `run` would begin with; only `frozen` where it is frozen."""
        now, found = self.situation(), freezing.frozen(self.cfg)
        if found is not None:
            return now, [Step("frozen", freezing.told(found))]
        return now, next_steps(now)

    def run(self, with_canary: bool = True) -> tuple[str, str, Situation]:
        """Do what is to be done until nothing is, or nothing can be; (end, why, last situation).

        End: done | hold | frozen. It waits at most `rollout.wait` seconds for evidence, and for a
        canary that is away.
        """
        until = time.monotonic() + self.cfg.rollout.wait
        while True:
            now = self.situation(with_canary)
            found = freezing.frozen(self.cfg)
            if found is not None:
                return "frozen", freezing.told(found), now
            step = next_steps(now)[0]
            if step.kind in ("done", "hold"):
                if step.kind == "hold":
                    self._note_hold(now, step.why)
                return step.kind, step.why, now
            assert self.held is not None, "this reconciler was opened to look only"
            self.held.check()
            try:
                why = step.why if step.kind == "wait" else self._do(now, step)
            except rows.Moved:
                continue
            if why and time.monotonic() >= until:
                self._note_hold(now, why)
                return "hold", why, now
            if why:
                time.sleep(self.cfg.rollout.poll)

    def _do(self, now: Situation, step: Step) -> str:
        """Carry out a step; returns why to wait before the next one, or nothing."""
        if step.kind == "canary":
            self._choose(now, step)
        elif step.kind == "go_back":
            self._go_back(now, step.why)
        elif step.kind == "look":
            return self._look(now, step)
        elif step.kind == "bring":
            return self._bring(now, step)
        return ""

    def _choose(self, now: Situation, step: Step) -> None:
        """Record the canary and all that its test depends on, before the first look."""
        champion, cfg = _champion(now), self.cfg
        evaluation = find_evaluation(cfg, champion.sha256)
        slices = judged_domains(evaluation, cfg.rollout) or self._domains_seen()
        others = len(now.seen) - 1
        needed = required(evaluation, slices, cfg.rollout, others)
        print_required(needed)
        if not others:
            console.print(
                "this fleet has one replica: it is compared with its own answers from before, "
                "which is weaker, since traffic and load change with time"
            )
        evidence = {
            "replica": step.url,
            "former": {"version": step.former.version, "sha256": step.former.sha256},
            "alone": not others,
            "slices": slices,
            "required": needed,
            "tolerance": {"all": cfg.rollout.max_loss, "slice": cfg.rollout.max_slice_loss},
            "error": cfg.rollout.error,
        }
        reason = f"{step.url} goes first; it is compared with {step.former}"
        with rows.recording(cfg, self._held(), champion) as record:
            row = record.add(rows.CANARY, _pair(step.former), champion, reason, evidence)
        console.print(f"canary: {reason}")
        self._read(row, self.fleet, _pair(step.drafter), step.former)

    def _domains_seen(self) -> list[str]:
        """Domains of the requests that replicas have finished, where no evaluation has any."""
        found: dict[str, int] = {}
        for url in self.fleet.urls:
            try:
                with self.fleet.client(url, self.cfg) as client:
                    for row in client.acceptance(0).get("rows") or []:
                        name = str(row.get("domain") or "")
                        found[name] = found.get(name, 0) + 1
            except ReplicaFault:
                continue
        slices = {"domain": {name: {"rounds": count} for name, count in found.items() if name}}
        return judged_domains({"tau": {"slices": slices}}, self.cfg.rollout)

    def _bring(self, now: Situation, step: Step) -> str:
        if step.why.startswith("falls back"):
            self._note(now, rows.FALLBACK, step.why)
        mine = now.history.canary
        first = mine if mine and mine["evidence"]["replica"] == step.url else None
        try:
            restarted = self._bring_once(step)
        except CannotServe as error:
            if first and not now.history.proven and step.drafter.sha256 == _sha(now):
                self._send_back(now, former_of(first), f"it cannot be served: {error}", None)
                return ""
            self._give_up(step.url, str(error))
            return ""
        except Unreachable as error:  # it may come back
            self._held().check()
            console.print(f"note: {error}")
            return str(error)
        except (ReplicaFault, ValueError) as error:
            self._held().check()  # a lost lease ends the command
            self._give_up(step.url, str(error))
            return ""
        console.print(f"{step.url} drafts with {step.drafter}: {step.why}")
        self.done.append(f"{step.url}: {step.drafter}")
        if restarted:
            self._note(now, rows.RESTART, f"{step.url} was restarted with {step.drafter}")
        return ""

    def _bring_once(self, step: Step) -> bool:
        """As `bring`; a replica that dies twice of the same drafter cannot serve it."""
        assert self.registry is not None  # something is registered
        try:
            return bring(self.cfg, self.fleet, self.registry, step.url, step.drafter)
        except Died as error:
            self.deaths[step.url, step.drafter.sha256] += 1
            if self.deaths[step.url, step.drafter.sha256] < DEATHS:
                raise
            raise CannotServe(f"{step.url} died {DEATHS} times while it took it") from error

    def _give_up(self, url: str, why: str) -> None:
        """Leave a replica alone for the rest of this pass."""
        console.print(f"note: {why}")
        self.given_up[url] = why

    def _look(self, now: Situation, step: Step) -> str:
        """One look at the evidence; decides, or says why not yet."""
        row = now.history.canary
        assert row is not None
        champion = _champion(now)
        self._read(row, self.fleet, _pair(step.drafter), step.former)
        assert self.kept is not None
        verdict = self.verdict = judge(self.kept.arms, self.cfg.rollout)
        reason = "; ".join(verdict.reasons)
        measured = (now.history.measured or {}).get("evidence") or {}
        known = (measured.get("verdict") or {}).get("answers", [0])[0]
        evidence = {"rollout": row["number"], "verdict": verdict.summary()}
        if verdict.answer == "rollback":
            self._send_back(now, step.former, reason, verdict)
            return ""
        if verdict.answer == "advance":
            with rows.recording(self.cfg, self._held(), champion) as record:
                record.add(rows.ADVANCE, _pair(step.former), champion, reason, evidence)
            console.print(f"advance: {reason}")
            self.done.append("advance")
            return ""
        if verdict.answers[0] > MORE * known:
            with rows.recording(self.cfg, self._held(), champion) as record:
                record.add(rows.MEASURE, _pair(step.former), champion, reason, evidence)
        return reason

    def _read(
        self, row: dict[str, Any], fleet: Fleet, wanted: tuple[str, str], former: Named
    ) -> None:
        """Read the feeds and keep what is new."""
        evidence, number = row["evidence"], row["number"]
        if self.rollout != number or self.kept is None:
            place = self.cfg.place("rollouts", str(number))
            self.kept, self.rollout = KeptAnswers(place, evidence["slices"]), number
        shas = (wanted[1], former.sha256)
        batch, faults = read_feeds(
            self.cfg, fleet, self.kept, evidence["replica"], shas, evidence["alone"]
        )
        for fault in set(faults) - set(self.faults):
            console.print(f"note: {fault}")
        self.faults = faults
        self._held().check()
        self.kept.add(batch)

    def _send_back(
        self, now: Situation, former: Named, reason: str, verdict: Verdict | None
    ) -> None:
        """Record that the champion goes back, then move the registry; the next step moves the
        canary.
        """
        champion = _champion(now)
        row = now.history.canary
        evidence = {
            "rollout": row["number"] if row else None,
            "verdict": verdict.summary() if verdict else None,
        }
        with rows.recording(self.cfg, self._held(), champion) as record:
            record.add(rows.ROLLBACK, _pair(former), champion, reason, evidence)
        console.print(f"roll back: {reason}")
        self._go_back(now, reason)

    def _go_back(self, now: Situation, reason: str) -> None:
        champion = _champion(now)
        if self.rollout is None and now.history.canary is not None:
            self.rollout = now.history.canary["number"]
        with rows.recording(self.cfg, self._held(), champion) as record:
            try:
                target, _ = go_back(self.cfg, record.moves, champion, f"roll-out: {reason}")
                console.print(f"rolled back: champion {champion.number} -> {target.number}")
            except NothingEarlier as error:
                record.moves.registry.mark_bad(champion, f"roll-out: {reason}")
                record.add(rows.FALLBACK, _pair(NONE), champion, str(error), None)
                console.print(f"note: {error}")
        self.done.append("rollback")
        self.went_back = reason

    def _note(self, now: Situation, action: str, reason: str) -> None:
        """Record something about the champion, unless that is its latest row already."""
        champion, last = now.champion, now.history.last
        if champion is None or self.held is None:
            return
        if last is not None and (last["action"], last["reason"]) == (rows.PREFIX + action, reason):
            return
        canary = now.history.canary
        former = former_of(canary) if canary else NONE
        evidence = {"rollout": canary["number"] if canary else None}
        if action == rows.HOLD and self.verdict is not None:
            evidence["verdict"] = self.verdict.summary()
        with rows.recording(self.cfg, self.held, champion) as record:
            record.add(action, _pair(former), champion, reason, evidence)

    def _note_hold(self, now: Situation, why: str) -> None:
        try:
            self._note(now, rows.HOLD, "; ".join([why, *self.given_up.values()]))
        except rows.Moved:
            return  # it holds something that is not wanted any more

    def _held(self) -> Lease:
        assert self.held is not None
        return self.held


def _champion(now: Situation) -> Version:
    assert now.champion is not None
    return now.champion


def _sha(now: Situation) -> str:
    return now.champion.sha256 if now.champion else ""


def _pair(named: Named) -> tuple[str, str]:
    return named.version, named.sha256


def _orphan(cfg: Config) -> tuple[str, Named, str] | None:
    """The latest canary without an end: (its URL, its drafter before, the first 12 digits of the
    one it was given).
    """
    found = [r for r in promotions.read(cfg.table("promotions")) if r["action"] == "rollout-canary"]
    if not found:
        return None
    later = [r["action"] for r in rows.rows_of_rollout(cfg, found[-1]["number"])]
    if {"rollout-advance", "rollout-rollback"} & set(later):
        return None
    return found[-1]["evidence"]["replica"], former_of(found[-1]), found[-1]["to_drafter"]
