"""What is done next, from what is wanted, recorded and observed; nothing is started here."""

from typing import Any

import pytest

from jobs.reconciling.next_steps import Named, Situation, next_steps
from jobs.reconciling.observed import Observed
from jobs.reconciling.rollout_rows import ADVANCE, FALLBACK, ROLLBACK, History
from jobs.registry.versions import Version

OLD, NEW = "a" * 64, "b" * 64
NOTHING = History(None, "", False, None, None)


def version(number="2", sha=NEW, target="t", bad=""):
    return Version(number, "", sha, {"target_id": target}, bad)


def replica(url, sha: str | None = OLD, target="t", **more: Any):
    if sha is None:
        return Observed(url, None, f"{url} cannot be reached")
    active = {"version": "1", "sha256": sha, "compat": {"target_id": target}} if sha else None
    return Observed(url, {"state": "ready", "target_id": target, "active": active} | more)


def canary(url, sha=OLD):
    row = {"number": 9, "evidence": {"replica": url, "former": {"version": "1", "sha256": sha}}}
    return History(row, "", False, None, row)


def steps(champion, history, *seen, **more):
    found = next_steps(Situation(champion, history, seen, **more))
    return [(step.kind, step.url, step.drafter.version) for step in found]


def test_one_replica_goes_first_and_the_others_wait():
    seen = [replica("u0"), replica("u1"), replica("u2")]
    assert steps(version(), NOTHING, *seen) == [("canary", "u0", "2")]
    assert steps(version(), canary("u0"), *seen)[0] == ("bring", "u0", "2")
    seen[0] = replica("u0", NEW)
    assert steps(version(), canary("u0"), *seen) == [("look", "u0", "2")]


def test_the_former_drafter_is_that_of_the_others():
    found = next_steps(Situation(version(), NOTHING, [replica("u0", ""), *map(replica, "xyz")]))
    assert found[0].former == Named("1", OLD)


def test_a_replica_that_has_it_already_is_the_canary():
    seen = [replica("u0"), replica("u1", NEW), replica("u2")]
    assert steps(version(), NOTHING, *seen) == [("canary", "u1", "2")]


def test_stragglers_of_a_fleet_that_has_it_follow():
    seen = [replica("u0", NEW), replica("u1"), replica("u2", NEW)]
    assert steps(version(), NOTHING, *seen) == [("bring", "u1", "2"), ("done", "", "")]


def test_a_canary_that_left_the_fleet_is_replaced_and_one_that_is_silent_is_waited_for():
    seen = [replica("u1"), replica("u2")]
    assert steps(version(), canary("u0"), *seen) == [("canary", "u1", "2")]
    assert steps(version(), canary("u0"), replica("u0", None), *seen)[0][0] == "wait"


def test_decisions_that_were_interrupted_are_finished():
    row = canary("u0").canary
    advanced = History(row, ADVANCE, True, None, row)
    assert steps(version(), advanced, replica("u0", NEW), replica("u1"))[0] == ("bring", "u1", "2")
    back = History(row, ROLLBACK, False, None, row)
    assert steps(version(), back, replica("u0", NEW), replica("u1"))[0][0] == "go_back"
    marked = version(bad="roll-out: bad")
    assert steps(marked, NOTHING, replica("u0"), replica("u1"))[0][0] == "go_back"


@pytest.mark.parametrize("floor", ["none", "3"])
def test_a_champion_without_an_earlier_one_falls_back_to_the_floor(floor):
    stuck = History(None, FALLBACK, False, None, None)
    lowest = version("3", "c" * 64) if floor == "3" else None
    found = steps(version(bad="dead"), stuck, replica("u0", NEW), replica("u1"), floor=lowest)
    assert found == [("bring", "u0", floor if lowest else ""), ("hold", "", "")]


def test_replicas_of_another_target_keep_their_own_drafter_or_fall_back():
    own, stale = replica("u0", OLD, target="new"), replica("u1", OLD)
    stale = Observed("u1", (stale.status or {}) | {"target_id": "new"})
    lowest = version("3", "c" * 64, target="new")
    assert steps(version(), NOTHING, own) == [("hold", "", "")]
    assert steps(version(), NOTHING, own, stale) == [("bring", "u1", ""), ("hold", "", "")]
    found = steps(version(), NOTHING, replica("u0", "", target="new"), floor=lowest)
    assert found == [("bring", "u0", "3"), ("hold", "", "")]


def test_nothing_is_done_while_most_are_gone_or_one_is_swapping():
    gone = [replica("u0"), replica("u1", None), replica("u2", None)]
    assert steps(version(), NOTHING, *gone) == [("hold", "", "")]
    busy = [replica("u0", state="swapping"), replica("u1")]
    assert steps(version(), NOTHING, *busy) == [("wait", "", "")]
    assert steps(None, NOTHING, replica("u0")) == [("hold", "", "")]
