"""The choice of K from measured costs."""

import pytest

from jobs.choose_k import Cost, choose, predicted

COSTS = [
    Cost(k=3, concurrency=1, cost=1.2),
    Cost(k=7, concurrency=1, cost=1.6),
    Cost(k=3, concurrency=8, cost=1.5),
    Cost(k=7, concurrency=8, cost=3.1),
]


def test_predicted_is_tau_over_interpolated_cost():
    found = predicted({3: 2.4, 5: 2.8}, COSTS, 5)
    assert found == {1: pytest.approx(2.8 / 1.4), 8: pytest.approx(2.8 / 2.3)}


def test_cheap_drafts_choose_a_long_block_and_dear_ones_a_short_one():
    taus = {1: 1.7, 3: 2.4, 5: 2.8, 7: 3.0}
    assert choose(taus, COSTS) == 3
    free = [Cost(k=k, concurrency=c, cost=1.0) for k in (3, 7) for c in (1, 8)]
    assert choose(taus, free) == 7
