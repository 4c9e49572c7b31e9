"""The choice of K from measured costs."""

import pytest

from jobs.choose_k import Cost, choose, predicted

COSTS = [
    Cost(k=3, batch=1, cost=1.2),
    Cost(k=7, batch=1, cost=1.6),
    Cost(k=3, batch=8, cost=1.5),
    Cost(k=7, batch=8, cost=3.1),
]
TAUS = {1: 1.5, 3: 2.4, 5: 2.9, 7: 3.0}


def test_predicted_is_tau_over_cost_between_the_measured_corners():
    assert predicted({5: 2.8}, COSTS, 1) == {5: pytest.approx(2.8 / 1.4)}
    assert predicted({5: 2.8}, COSTS, 8) == {5: pytest.approx(2.8 / 2.3)}
    middle = 1.4 + (2.3 - 1.4) * 3 / 7
    assert predicted({5: 2.8}, COSTS, 4) == {5: pytest.approx(2.8 / middle)}


def test_no_k_outside_the_measured_ones_is_considered():
    assert set(predicted(TAUS, COSTS, 8)) == {3, 5, 7}


def test_a_round_never_costs_less_than_a_step():
    cheap = [Cost(k=k, batch=b, cost=0.5) for k in (3, 7) for b in (1, 8)]
    assert predicted({3: 2.0}, cheap, 1) == {3: 2.0}


def test_long_blocks_for_small_batches_and_short_ones_for_large():
    found = choose(TAUS, COSTS)
    assert found[0] == 5
    assert found[-1] == 3
    assert list(found) == sorted(found, reverse=True)


def test_free_drafts_choose_the_whole_block_for_every_batch():
    free = [Cost(k=k, batch=b, cost=1.0) for k in (3, 7) for b in (1, 8)]
    assert choose(TAUS, free) == (7,)
