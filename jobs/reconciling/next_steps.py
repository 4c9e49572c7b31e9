"""What is to be done next, from what is wanted and what the replicas say. Nothing is done here.

Each step is small, and after it everything is looked at again. So a reconciler that was killed goes
on from where the fleet is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobs.reconciling.observed import Observed, majority
from jobs.reconciling.rollout_rows import FALLBACK, ROLLBACK, History
from jobs.registry.versions import Version


@dataclass(frozen=True, slots=True)
class Named:
    """A drafter by its number in the registry and its identity; two empty texts are no drafter."""

    version: str = ""
    sha256: str = ""

    def __str__(self) -> str:
        return f"version {self.version} ({self.sha256[:12]})" if self.sha256 else "no drafter"


NONE = Named()


@dataclass(frozen=True, slots=True)
class Step:
    """canary: choose replica `url`. bring: give it `drafter`. look: compare. go_back: the champion
    is to be rolled back. wait: a replica is away or busy, which may pass. hold: nothing can be done
    now. done: nothing is left to do.
    """

    kind: str
    why: str = ""
    url: str = ""
    drafter: Named = NONE
    former: Named = NONE


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that decides what to do. `floor`: where replicas of a target fall back to.
    `orphan`: the canary (URL, drafter before) of a version that was deleted.
    """

    champion: Version | None
    history: History
    seen: Sequence[Observed]
    floor: Version | None = None
    with_canary: bool = True
    orphan: tuple[str, Named, str] | None = None
    given_up: Sequence[str] = ()

    def __post_init__(self) -> None:
        assert self.seen, "a fleet has replicas"


def next_steps(now: Situation) -> list[Step]:
    """The steps in order; the last one is look, wait, hold or done."""
    there = [one for one in now.seen if one.status is not None]
    if 2 * len(there) < len(now.seen):
        gone = [one.fault for one in now.seen if one.status is None]
        why = f"{len(gone)} of {len(now.seen)} replicas do not answer ({gone[0]})"
        return [Step("hold", why)]
    if any(one.status and one.status["state"] == "swapping" for one in there):
        return [Step("wait", "a replica is swapping its drafter at this moment")]
    champion = now.champion
    if champion is None:
        return _without_champion(now, there)
    if champion.bad or now.history.decision == ROLLBACK:
        if now.history.decision != FALLBACK:
            return [Step("go_back", champion.bad or "the roll-out failed")]
        stuck = [one for one in there if one.sha256 == champion.sha256]
        why = f"version {champion.number} was rolled back, and no earlier one can be used"
        return [*_floor(now, stuck, why), Step("hold", why)]
    others = [one for one in there if one.target_id != champion.compat["target_id"]]
    if others:
        return _foreign(now, champion, others)
    return _follow(now, champion, there)


def _without_champion(now: Situation, there: list[Observed]) -> list[Step]:
    if now.orphan is not None:
        url, former, sha = now.orphan
        stray = [one for one in there if one.url == url and one.sha256[:12] == sha]
        if stray and url not in now.given_up:
            return [Step("bring", "its version was deleted", url, former)]
    return [Step("hold", "the registry has no champion: `flywheel promote` makes one")]


def _foreign(now: Situation, champion: Version, others: list[Observed]) -> list[Step]:
    """Replicas of another target never load the champion. One that drafts for its own target stays
    as it is; any other goes to the floor.
    """
    why = (
        f"version {champion.number} is for target {champion.compat['target_id']}, "
        f"{others[0].url} serves {others[0].target_id}: train and promote a drafter for that "
        "target, or `flywheel rollback`"
    )
    stale = [one for one in others if _target_of(one.active) != one.target_id]
    return [*_floor(now, stale, why), Step("hold", why)]


def _floor(now: Situation, replicas: list[Observed], why: str) -> list[Step]:
    steps = []
    for one in replicas:
        floor = NONE
        if now.floor is not None and now.floor.compat["target_id"] == one.target_id:
            floor = Named(now.floor.number, now.floor.sha256)
        if one.sha256 != floor.sha256 and one.url not in now.given_up:
            steps.append(Step("bring", f"falls back: {why}", one.url, floor))
    return steps


def _follow(now: Situation, champion: Version, there: list[Observed]) -> list[Step]:
    """All serve the champion's target."""
    wanted = Named(champion.number, champion.sha256)
    behind = [one for one in there if one.sha256 != champion.sha256]
    gone = [one for one in now.seen if one.status is None]
    past = now.history
    if not behind:
        return [_end(now, gone)] if past.canary is None or past.proven else _compare(now, there)
    most = 2 * (len(there) - len(behind)) > len(there)
    if past.proven or not now.with_canary or (past.canary is None and most):
        able = [one for one in behind if one.url not in now.given_up]
        brought = [Step("bring", "follows the champion", one.url, wanted) for one in able]
        return [*brought, _end(now, gone)]
    if past.canary is None or _url(past.canary) not in [one.url for one in now.seen]:
        chosen = next((one for one in there if one.sha256 == champion.sha256), there[0])
        rest = [one for one in behind if one.url != chosen.url] or behind
        sha = majority(rest) or ""
        version = next((str(r.active.get("version") or "") for r in rest if r.sha256 == sha), "")
        return [Step("canary", "", chosen.url, wanted, Named(version, sha))]
    return _compare(now, there)


def _compare(now: Situation, there: list[Observed]) -> list[Step]:
    champion, row = now.champion, now.history.canary
    assert champion is not None
    assert row is not None
    url, former = _url(row), former_of(row)
    canary = next((one for one in there if one.url == url), None)
    if canary is None:
        return [Step("wait", f"the canary {url} does not answer")]
    if canary.sha256 != champion.sha256 and url in now.given_up:
        return [Step("hold", f"the canary {url} did not take the champion")]
    steps = []
    if canary.sha256 != champion.sha256:
        wanted = Named(champion.number, champion.sha256)
        steps.append(Step("bring", "it is the canary", url, wanted))
    for one in there:
        if one.url != url and one.sha256 != former.sha256 and one.url not in now.given_up:
            why = "it is not the canary"
            steps.append(Step("bring", why, one.url, former))
    return [*steps, Step("look", "", url, Named(champion.number, champion.sha256), former)]


def _end(now: Situation, gone: Sequence[Observed]) -> Step:
    if gone:
        faults = "; ".join(one.fault or one.url for one in gone)
        return Step("hold", f"{faults}; who does not answer gets the champion later")
    if now.given_up:
        return Step("hold", f"not done: {', '.join(now.given_up)}")
    return Step("done", "every replica drafts with the champion")


def former_of(row: dict[str, Any]) -> Named:
    """The drafter that a canary is compared with, from its row."""
    former = row["evidence"]["former"]
    return Named(former["version"], former["sha256"])


def _url(row: dict[str, Any]) -> str:
    return row["evidence"]["replica"]


def _target_of(active: dict[str, Any]) -> str:
    """The target that a loaded drafter is for; a replica without one needs no floor but none."""
    return str((active.get("compat") or {}).get("target_id") or "")
