"""The choice of K from measured rounds."""

import pytest

from jobs.proof.choose_k import Cost, by_batch, choices, choose, predicted

TAUS = {1: 1.5, 3: 2.4, 5: 2.9, 7: 3.0}


def costs(fixed, row, step=(0.05, 0.06)):
    """Costs at batch sizes 1 and 8: of plain steps, and of rounds with K 3 and 7 that take `fixed`
    seconds plus `row` seconds per row.
    """
    plain = [Cost(k=0, batch=b, seconds=s) for b, s in zip((1, 8), step, strict=True)]
    return plain + [
        Cost(k=k, batch=b, seconds=fixed + row * b * (k + 1)) for k in (3, 7) for b in (1, 8)
    ]


def test_predicted_is_tau_times_step_over_round():
    found = costs(0.05, 0.002)
    assert predicted({5: 2.8}, found, 1) == {5: pytest.approx(2.8 * 0.05 / 0.062)}
    assert predicted({5: 2.8}, found, 8) == {5: pytest.approx(2.8 * 0.06 / 0.146)}
    step = 0.05 + 0.01 * 3 / 7
    assert predicted({5: 2.8}, found, 4) == {5: pytest.approx(2.8 * step / 0.098)}


def test_no_k_outside_the_measured_ones_is_considered():
    assert set(predicted(TAUS, costs(0.05, 0.002), 8)) == {3, 5, 7}


def test_a_single_k_is_what_is_predicted():
    one = [cost for cost in costs(0.05, 0.002) if cost.k in (0, 7)]
    assert predicted(TAUS, one, 8) == {7: pytest.approx(3.0 * 0.06 / 0.178)}


def test_a_round_never_costs_less_than_a_step():
    assert predicted({3: 2.0}, costs(0.01, 0.0), 1) == {3: pytest.approx(2.0)}


def test_long_blocks_for_small_batches_and_short_ones_for_large():
    found = choose(TAUS, costs(0.05, 0.002))
    assert found[0] == 5
    assert found[-1] == 3
    assert list(found) == sorted(found, reverse=True)


def test_free_drafts_choose_the_whole_block_for_every_batch():
    assert choose(TAUS, costs(0.06, 0.0)) == (7,)


def test_one_lucky_pass_does_not_choose_a_long_block():
    """K = 7 at batch size 8 is measured a quarter too fast, as can happen on a shared machine."""
    lucky = [
        Cost(k=c.k, batch=c.batch, seconds=c.seconds * (0.75 if (c.k, c.batch) == (7, 8) else 1))
        for c in costs(0.05, 0.003)
    ]
    assert choose(TAUS, lucky)[-1] == 3


def test_k_is_0_where_not_even_the_best_k_pays():
    """Tau 1.44 was once promoted, and served slower than plain decoding at 8 requests."""
    found = choices(TAUS, costs(0.05, 0.008))
    assert found[0].k > 0
    assert (found[-1].batch, found[-1].k, found[-1].best) == (8, 0, 3)
    assert found[-1].speedup == pytest.approx(2.4 * 0.06 / (0.05 + 0.008 * 32))
    assert choose(TAUS, costs(0.05, 0.008))[-1] == 0
    assert choose({3: 1.2, 7: 1.3}, costs(0.08, 0.01)) == (0,)


def test_the_floor_is_by_batch_size_and_the_last_is_for_all_larger():
    speeds = {one.batch: one.speedup for one in choices(TAUS, costs(0.06, 0.0))}
    assert speeds[1] == pytest.approx(2.5)
    found = choices(TAUS, costs(0.06, 0.0), [1.0, 2.9])
    assert [one.floor for one in found] == [1.0, *[2.9] * 7]
    assert by_batch(found) == (7, 0, 0, 0, 0, 0, 7)
