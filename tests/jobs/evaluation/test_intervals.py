"""Intervals keep what they promise: coverage, power and clustering, by seeded simulation."""

from dataclasses import replace

import numpy as np
import pytest

from bench import gate
from bench.intervals import WORLDS, measure
from jobs.evaluation.intervals import Resamples
from tests.helpers.promotion import reasons

DATASETS, CONVERSATIONS, REQUESTS, DRAWS, K = 300, 24, 3, 400, 4
GAIN = 0.12


def simulate(rng, gain):
    """Walks of two drafters over the same requests: conversations differ in how easy they are and
    how long; requests of one conversation are alike. `gain` is added to the second one's chance.
    """
    ease = rng.beta(2, 2, CONVERSATIONS).repeat(REQUESTS)
    rounds = rng.geometric(1 / 15, CONVERSATIONS * REQUESTS)

    def walk(chance, count):
        misses = rng.random((count, K)) > chance
        return np.where(misses.any(1), misses.argmax(1), K).tolist()

    return [
        [walk(min(0.95, e * 0.7 + more), n) for e, n in zip(ease, rounds, strict=True)]
        for more in (0.0, gain)
    ]


def tau_of(gain):
    """The true tau: rounds per request do not depend on ease here."""
    chance = np.minimum(0.95, np.random.default_rng(9).beta(2, 2, 400_000) * 0.7 + gain)
    return float(sum(np.mean(chance**k) for k in range(K + 1)))


def truth(gain):
    """The true difference of tau."""
    return tau_of(gain) - tau_of(0.0)


NAMES = [f"c{i // REQUESTS}" for i in range(CONVERSATIONS * REQUESTS)]


def shares(gain, names):
    """(share of intervals that hold the true gain, share above 0, mean detectable)."""
    rng, true = np.random.default_rng(3), truth(gain)
    holds = above = detectable = 0.0
    for _ in range(DATASETS):
        theirs, ours = simulate(rng, gain)
        found = Resamples(names, DRAWS).tau_gain(ours, theirs, K)
        assert found.interval is not None
        assert found.detectable is not None
        holds += found.interval[0] <= true <= found.interval[1]
        above += found.interval[0] > 0
        detectable += found.detectable
    return holds / DATASETS, above / DATASETS, detectable / DATASETS


def test_the_interval_of_a_gain_holds_the_truth_95_times_in_100():
    """With 24 conversations. 300 datasets at 95 % fall outside 0.91..0.985 once in a thousand."""
    holds, _, _ = shares(GAIN, NAMES)
    assert 0.91 <= holds <= 0.985


def test_the_detectable_gain_is_found_four_times_out_of_five():
    """At the true gain that equals the detectable one; 300 datasets are within 0.07 of 0.8."""
    knob, found = GAIN, 0.0
    for _ in range(4):  # the error depends on the gain, so this iterates to a fixed point
        _, found, detectable = shares(knob, NAMES)
        knob *= detectable / truth(knob)
    assert 0.73 <= found <= 0.87


def test_requests_of_one_conversation_are_not_independent():
    """The interval of tau is too narrow if requests are drawn, and not if conversations are."""
    rng, holds = np.random.default_rng(4), {"conversation": 0.0, "request": 0.0}
    true = tau_of(0.0)
    alone = [str(i) for i in range(len(NAMES))]
    for _ in range(DATASETS):
        walks, _ = simulate(rng, 0.0)
        for unit, names in (("conversation", NAMES), ("request", alone)):
            low, high = Resamples(names, DRAWS).tau(walks, K).interval or (0, 0)
            holds[unit] += (low <= true <= high) / DATASETS
    assert holds["conversation"] >= 0.91
    assert holds["request"] < 0.85


def test_values_are_ratios_of_sums_and_pairing_cancels_what_is_shared():
    names = [f"c{i}" for i in range(12)]
    ours = [[i % 4, 2] for i in range(12)]
    theirs = [[max(0, i % 4 - 1), 2] for i in range(12)]
    draws = Resamples(names, 200)
    assert draws.tau(ours, 3).value == pytest.approx(1 + sum(map(sum, ours)) / 24)
    gain = draws.tau_gain(ours, theirs, K)
    assert gain.value == pytest.approx(draws.tau(ours, 3).value - draws.tau(theirs, 3).value)
    assert gain.error is not None
    assert gain.error < (draws.tau(ours, 3).error or 0)
    assert draws.position(ours, 2).value == pytest.approx(18 / 24)
    assert draws.position_gain(ours, theirs, 3).value == pytest.approx(3 / 24)
    same = draws.tau_gain(ours, ours, 3)
    assert (same.value, same.detectable, same.conversations_for(0.1)) == (0.0, None, None)
    rounded = replace(same, error=4e-17)  # of ratios that are equal but for the last digit
    assert (rounded.detectable, rounded.conversations_for(0.1)) == (None, None)
    assert same.interval is not None
    assert same.interval[0] < -0.1 < 0.1 < same.interval[1], "a 13th conversation may differ"
    wanted = gain.conversations_for((gain.detectable or 0) / 2)
    assert wanted == pytest.approx(4 * 12, abs=1)


def test_too_few_conversations_have_no_interval():
    walks = [[1, 2], [0], [3], [1], [], []]
    names = ["a", "b", "c", "c", "d", "e"]
    few = Resamples(names, 200).tau(walks, 3)
    assert (few.value, few.interval, few.detectable) == (pytest.approx(12 / 5), None, None)
    assert few.conversations == 3, "answers of one token have no round"


def test_shares_of_yes_and_no_have_the_interval_of_clopper_and_pearson():
    """None of 12 conversations: 0 .. 1 - 0.025 ** (1 / 12). 400 draws are within 0.04 of it."""
    never = Resamples([str(i) for i in range(12)], 400).position([[0, 0]] * 12, 4)
    assert never.interval == [0.0, pytest.approx(1 - 0.025 ** (1 / 12), abs=0.04)]
    always = Resamples([str(i) for i in range(12)], 400).position([[4, 4]] * 12, 4)
    assert always.interval == [pytest.approx(0.025 ** (1 / 12), abs=0.04), 1.0]
    rare = Resamples([str(i) for i in range(12)], 400).position([[0, 0]] * 11 + [[3, 0]], 3)
    assert rare.value == pytest.approx(1 / 24)
    assert rare.interval is not None
    assert 0 < rare.interval[0] < 1 / 24 < 0.2 < rare.interval[1] < 0.4


def test_conversations_that_all_say_the_same_are_not_certain():
    """Five conversations with tau 2.5 each once had an interval of width 0."""
    found = Resamples([str(i) for i in range(5)], 400).tau([[1, 2]] * 5, 3)
    assert found.value == 2.5
    assert found.interval is not None
    assert found.interval[0] < 2.2 < 2.8 < found.interval[1]


@pytest.mark.parametrize("bad", [0, 1, 2, 3, 5])
def test_twenty_conversations_are_not_too_few_for_a_drafter_that_is_nearly_perfect(bad):
    """A tau of 3.78 of 4 once had no interval and was refused, while 2.70 was promoted."""
    walks = [[0, 3, 2, 3, 0, 3]] * bad + [[3] * 12] * (20 - bad)
    measured = Resamples([str(i) for i in range(20)], 1000).tau(walks, 3)
    assert measured.interval is not None
    low, high = measured.interval
    assert 3.0 < low < measured.value <= high <= 4.0
    evaluation = {
        "tau": {"pooled": measured.value, "ci": measured.interval, "domains": {}},
        "baseline": None,
        "leaking": {"leaking": 0, "samples": 20},
    }
    assert reasons(evaluation) == []


def test_intervals_of_several_parts_together_are_wider():
    """Student's quantile at 1 - 0.025 / 5 over that at 1 - 0.025, with 9 degrees of freedom."""
    walks = [[3, 1, 0], [2, 0, 1], [1, 1, 1], [3, 3, 0], [0, 1, 0], [2, 2, 0], [1, 0, 3]]
    walks += [[0, 0, 2], [3, 0, 1], [1, 2, 2]]
    found = Resamples([str(i) for i in range(10)], 1000).tau(walks, 3)
    assert found.effective == 10
    alone, one = found.among(1), found.among(5)
    assert alone[0] == pytest.approx(found.interval)
    assert found.interval is not None
    assert found.error is not None
    assert one[0] is not None
    for narrow, wide in zip(found.interval, one[0], strict=True):
        assert wide - found.value == pytest.approx(1.4366 * (narrow - found.value), rel=1e-4)
    assert one[1] == pytest.approx((3.2498 + 0.8416) * found.error, rel=1e-4)
    uneven = Resamples(["a", "b", "c", "d", "e"], 200).tau([[1] * n for n in (1, 1, 1, 1, 96)], 3)
    assert uneven.effective == pytest.approx(100**2 / (96**2 + 4))


@pytest.mark.parametrize(("effect", "size"), [(0.0, 10), (0.0, 30), (-0.10, 200)])
def test_equal_drafters_are_not_refused_and_losses_are(effect, size):
    """docs/explanation/gate.md has the whole table; of 150 domains, 5 % would be 7."""
    found = gate.shares(size, effect, 150)
    if effect:
        assert found[2]["refuse"] > 0.8
        assert found[2]["pass"] < 0.2
    else:
        assert found[2]["refuse"] <= 0.04
        assert found[20]["refuse"] <= 0.02


@pytest.mark.parametrize("size", [5, 20, 100])
@pytest.mark.parametrize("world", WORLDS)
def test_intervals_hold_the_truth_near_the_limits_too(world, size):
    """120 datasets; an interval that holds 93 % (the least in docs/decisions/034 is 92.7 %) falls
    below 0.84 once in five thousand runs, and one of 70 % never reaches it.
    """
    coverage, width = measure(WORLDS[world], size, 120)
    assert coverage >= 0.84
    assert 0 < width < (4 if world.startswith(("gain", "loss")) else 2.2)


def test_the_draws_of_a_gain_near_the_limit_are_not_widened():
    """If conversations differ enough, the interval is that of the studentized draws alone."""
    coverage, width = measure(WORLDS["gain near B"], 20, 120)
    assert coverage >= 0.84
    assert width < 0.2
