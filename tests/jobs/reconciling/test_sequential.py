"""The sequential tests: what they leave out, and that looking does not make errors."""

import math

import numpy as np
import pytest

from jobs.base.sections.rolling_out import Rollout
from jobs.reconciling.evidence import CANARY, REST, Answer, Arms, answer_of
from jobs.reconciling.required_traffic import judged_domains, required
from jobs.reconciling.sequential import (
    FEWEST,
    Ratio,
    Side,
    boundary,
    conversations_needed,
    evidence_of_death,
    evidence_of_failures,
    evidence_of_life,
    positions,
    tokens_per_round,
)
from jobs.reconciling.three_answers import judge

K = 3


def answer(rng, chance, number, k=K, rounds=10, name="a"):
    missed = rng.random((rounds, k)) > chance
    accepted = np.where(missed.any(1), missed.argmax(1), k).tolist()
    counts = positions(accepted, [k] * rounds, K)
    return Answer(name, str(number), rounds, counts, 1.0, sum(accepted) + rounds, 0.1)


def test_positions_are_conditional_and_leave_out_the_last_token():
    # Round 1: all of 3 accepted. Round 2: the second draft missed. The last round is cut after 1.
    offered, tried, passed = positions([3, 1, 1], [3, 3, 3], 4)
    assert offered == [3, 3, 3, 0]
    assert tried == [3, 2, 1, 0]
    assert passed == [3, 1, 1, 0]
    # K was 1 in a busy minute: nothing beyond was offered or tried.
    assert positions([1, 0], [1, 2], 3) == ([2, 1, 0], [1, 0, 0], [1, 0, 0])


def test_the_same_drafter_at_another_k_shows_no_difference():
    """Tau of the canary is far lower, since its K is; what was offered was accepted as often."""
    rng = np.random.default_rng(0)
    arms = Arms(["a"], K)
    for number in range(2000):
        arms.add(CANARY, answer(rng, 0.7, number, k=1))
        arms.add(REST, answer(rng, 0.7, -number, k=3))
    found = judge(arms, Rollout()).judged[0]
    assert found.difference is not None
    assert abs(found.difference) < 0.02


def test_the_ratio_is_that_of_tokens_per_round():
    offered = np.array([100.0, 100.0])
    ours = Side(np.array([[100.0, 50.0]]), np.array([[50.0, 25.0]]), offered, 100)
    theirs = Side(np.array([[100.0, 80.0]]), np.array([[80.0, 64.0]]), offered, 100)
    found = tokens_per_round(ours, theirs)
    assert found is not None
    assert np.exp(found.value) == pytest.approx((1 + 0.5 + 0.25) / (1 + 0.8 + 0.64), rel=0.01)


def test_an_interval_is_finite_however_odd_the_tolerance():
    """It is written as JSON."""
    wide = Ratio(0.0, 0.5, (FEWEST, FEWEST)).interval(1e-9, 1e-6, 1e-6)
    assert -1 <= wide[0] < 0 < wide[1] < math.inf


def test_k_zero_on_one_side_is_no_comparison():
    drafting = Side(np.ones((30, 1)), np.ones((30, 1)), np.ones(1) * 30, 30)
    idle = Side(np.zeros((30, 1)), np.zeros((30, 1)), np.zeros(1), 30)
    assert tokens_per_round(drafting, idle) is None
    assert tokens_per_round(idle, drafting) is None


def test_few_conversations_say_nothing_however_clear_they_are():
    rng = np.random.default_rng(0)
    arms = Arms(["a"], K)
    for number in range(FEWEST - 1):
        for part in range(50):
            arms.add(CANARY, answer(rng, 0.1 + part * 0, number))
            arms.add(REST, answer(rng, 0.9, -number))
    found = judge(arms, Rollout(min_first=0.001))
    assert found.answer == "hold"


@pytest.mark.parametrize("error", [0.05, 0.2])
def test_looking_at_every_step_does_not_add_errors(error):
    """5000 Brownian paths, looked at 400 times each: the share that ever leaves the interval."""
    rng = np.random.default_rng(1)
    steps = np.arange(20, 420)
    paths = np.cumsum(rng.normal(size=(5000, 420)), 1)[:, 20:] / steps
    reach = [boundary(0.3, 1 / np.sqrt(n), error) / np.sqrt(n) for n in steps]
    ever = (paths > np.array(reach)).any(1).mean()
    fixed = (paths > 1.645 / np.sqrt(steps)).any(1).mean()  # a fixed 5 % test, looked at as often
    assert ever <= error
    assert fixed > 0.2


def test_exact_tests_of_dead_drafters_and_failures():
    assert evidence_of_death([0.0] * 100, 0.1) > 1000
    assert evidence_of_death([0.3] * 100, 0.1) < 1
    assert evidence_of_life([0.3, 0.5] * 30, 0.1) > 1000
    assert evidence_of_life([0.0] * 30, 0.1) < 1
    assert evidence_of_failures([(100, 10, 100, 0)]) > 100
    assert evidence_of_failures([(100, 10, 1000, 100)]) < 5
    assert evidence_of_failures([(0, 0, 0, 0), (5, 0, 5, 0)]) == 1


def test_answers_without_a_drafter_have_no_rounds():
    row = {"seq": 1, "drafter_sha256": "", "accepted": [0, 0], "drafted": [0, 0], "domain": None}
    row["finished_at"] = 1.0
    assert answer_of(row, ["a"]).rounds == 0


def test_required_traffic_follows_from_the_spread_of_the_evaluation():
    domain = {"a": {"tau": 2.0, "ci": [1.9, 2.1], "rounds": 960, "conversations": 100}}
    domain["tiny"] = {"tau": 2.0, "ci": None, "rounds": 40, "conversations": 2}
    tau = {"pooled": 2.0, "ci": [1.9, 2.1], "slices": {"domain": domain}}
    evaluation = {"tau": tau, "conversations": 100, "samples": 200}
    limits = Rollout()
    assert judged_domains(evaluation, limits) == ["a"]
    overall, _ = required(evaluation, ["a", "unknown"], limits, others=3)
    assert overall["advance"] > overall["rollback"] > FEWEST
    assert overall["advance_requests"] == overall["advance"] * 4 * 2
    # Half the tolerance needs about four times the traffic.
    wide = conversations_needed(0.25, 1, 0.1, 0.1, 0.05)
    assert 3 < conversations_needed(0.25, 1, 0.05, 0.05, 0.05) / wide < 5
    assert required(None, [], limits, 1) == []
