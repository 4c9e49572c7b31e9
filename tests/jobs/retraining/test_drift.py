"""The drift test: how often it errs, what it sees, and that a mix is not taken for drift."""

from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from bench.drift import delay, false_alarms, mix_alarms, simulate
from jobs.base.config import load
from jobs.retraining.drift import find_drift, find_mix, served_requests
from jobs.retraining.policy import read_policy
from tests.helpers.retraining import NOON
from tests.helpers.tables import add_rows

LIMITS = read_policy("").drift
SMALL = replace(LIMITS, short=100, long=400)


def test_traffic_that_does_not_change_hardly_alarms():
    """Nominally 1 look in 1,000. More than 2 alarms in 40 looks have a chance below 1e-3 even at
    five times that rate.
    """
    alarms, looks = false_alarms(SMALL, series=8, looks=5)
    assert looks == 40
    assert alarms <= 2


def test_a_fall_is_seen():
    share, median = delay(LIMITS, 0.20, series=3)
    assert share == 1.0
    assert median is not None
    assert median <= LIMITS.short


def test_another_mix_is_told_from_drift():
    alarms, mix, within = mix_alarms(SMALL, series=3)
    assert alarms == 0
    assert mix < -0.3
    assert abs(within) < 0.06  # noise of 300 requests, most of them of one domain: 0.02


def test_another_k_is_not_drift():
    """K falls with the load: tokens per round fall, and no domain has changed."""
    rng = np.random.default_rng(0)
    before = simulate(rng, 600)
    after = [
        replace(
            one,
            tried=[*one.tried[:2], *[0] * 30],
            passed=[*one.passed[:2], *[0] * 30],
            offered=[*one.offered[:2], *[0] * 30],
        )
        for one in simulate(rng, 100, start=600)
    ]
    assert not find_drift([*before, *after], SMALL)[0].fires


def test_it_goes_on_firing_until_it_has_recovered():
    rng = np.random.default_rng(1)
    good, fallen = simulate(rng, 500), simulate(rng, 100, tau=2.0, start=500)
    better = simulate(rng, 100, tau=2.41, start=600)  # a loss of about 3.5 %: below the limit
    well = simulate(rng, 100, start=700)
    assert not find_drift(good, SMALL)[0].fires
    assert find_drift([*good, *fallen], SMALL)[0].fires
    wide = replace(SMALL, long=500)
    still = find_drift([*good, *fallen, *better], wide)[0]
    assert not find_drift([*good, *better], SMALL)[0].fires  # without the fall before it
    assert still.change is not None
    assert still.fires == (still.change <= -LIMITS.recovered)
    assert not find_drift([*good, *fallen, *well], SMALL)[0].fires


def test_too_few_requests_say_nothing():
    found = find_drift(simulate(np.random.default_rng(2), 199), SMALL)[0]
    assert (found.change, found.fires, found.requests) == (None, False, 199)
    assert find_mix([], SMALL) is None


@pytest.fixture
def cfg(tmp_path):
    return load(None, [f"work={tmp_path}"])


def served(i: int, **changes):
    row = {"request_id": f"r{i:04}", "conversation_id": f"c{i}", "origin": "served", "log": "l"}
    row |= {"drafter_version": "d", "target_id": "t", "domain": "a"}
    row |= {"accepted": [3, 0], "drafted": [3, 3], "finished_at": NOON + timedelta(seconds=i)}
    return row | changes


def test_requests_are_read_in_order_whatever_a_clock_says(cfg):
    """A row dated in the future counts as of its ingestion, so it does not stay the newest."""
    ingested = [NOON + timedelta(hours=hours) for hours in (1, 3)]
    add_rows(
        cfg, "logs", [{"log": n, "ingested_at": t} for n, t in zip("lm", ingested, strict=True)]
    )
    rows = [served(i) for i in range(5)]
    rows += [served(90, finished_at=NOON + timedelta(days=4000)), served(91, finished_at=None)]
    rows += [served(100 + i, log="m", finished_at=NOON + timedelta(hours=2)) for i in range(3)]
    rows += [served(200, drafter_version="x"), served(201, target_id="x"), served(202, log=None)]
    rows += [served(203, origin="replay"), served(204, accepted=[], drafted=[])]
    add_rows(cfg, "acceptance", rows)
    found = served_requests(cfg, "t", "d", SMALL)
    order = ["c0", "c1", "c2", "c3", "c4", "c90", "c91", "c100", "c101", "c102"]
    assert [one.conversation for one in found] == order
    assert (found[0].offered[:3], found[0].passed[:3]) == ([2, 2, 2], [1, 1, 1])


def test_only_the_newest_requests_of_the_largest_domains_are_read(cfg):
    add_rows(cfg, "logs", [{"log": "l", "ingested_at": NOON + timedelta(days=1)}])
    add_rows(cfg, "acceptance", [served(i) for i in range(1000)])
    add_rows(cfg, "acceptance", [served(2000 + i, domain=f"d{i}") for i in range(30)])
    found = served_requests(cfg, "t", "d", replace(SMALL, short=40, long=40))
    mine = [one for one in found if one.slice == "a"]
    assert len(mine) == 40 + 40 + 8 * 20
    assert mine[-1].conversation == "c999"
    assert len({one.slice for one in found}) == 20
