"""The counting rules of dflash.acceptance, by hand and for any rounds."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.acceptance import (
    cut_at_end,
    fit_alpha,
    geometric_tau,
    num_rounds,
    positions,
    tau,
    tau_macro,
    tau_of_counts,
    tau_weighted,
    traffic_rounds,
)


def test_formulas_by_hand():
    accepted = [[2, 0], [1], []]
    assert (num_rounds(accepted), tau(accepted), tau_macro(accepted)) == (3, 2.0, 2.0)
    assert positions(accepted, 2) == [2 / 3, 1 / 3]
    assert tau_of_counts(6, 3) == 2.0
    uneven = [[3], [0, 0, 0]]
    assert (tau(uneven), tau_macro(uneven)) == (7 / 4, 5 / 2)


@pytest.mark.parametrize(
    "measure", [tau, tau_macro, lambda none: positions(none, 2), lambda _: tau_of_counts(0, 0)]
)
@pytest.mark.parametrize("nothing", [[], [[]]])
def test_an_empty_set_has_no_acceptance(measure, nothing):
    with pytest.raises(ValueError, match="no rounds"):
        measure(nothing)


@pytest.mark.parametrize(
    ("counted", "num_output", "cut"),
    [
        ([3, 5], 10, [3, 4]),  # 4 + 5 + the last one from the target
        ([3, 5], 7, [3, 1]),  # ends inside the second run
        ([3, 5], 6, [3, 0]),  # ends with the first token of the second run
        ([3, 5], 5, [3]),  # ends with the round
        ([7], 3, [1]),  # an answer shorter than a block
        ([7], 2, [0]),
        ([], 1, []),  # the first token comes from prefill
    ],
)
def test_rounds_are_cut_where_the_answer_ends(counted, num_output, cut):
    assert cut_at_end(counted, num_output) == cut


def test_rounds_that_are_too_few_for_an_answer_are_refused():
    with pytest.raises(ValueError, match="emit 4 tokens after the first, but the answer has 6"):
        cut_at_end([3], 6)


@given(st.lists(st.integers(0, 7), min_size=1), st.data())
def test_what_is_counted_is_what_was_emitted(counted, data):
    longest = sum(counted) + len(counted) + 1
    num_output = data.draw(st.integers(2, longest))
    cut = cut_at_end(counted, num_output)
    assert sum(cut) + len(cut) == num_output - 1
    assert cut[:-1] == counted[: len(cut) - 1]
    assert sum(positions([cut], 7)) + 1 == pytest.approx(tau([cut]))


def test_the_alpha_model_is_recovered_and_its_misfit_shows():
    assert geometric_tau(0.5, 2) == 1.75
    assert (geometric_tau(0.0, 7), geometric_tau(1.0, 7)) == (1.0, 8.0)
    made = {k: geometric_tau(0.62, k) for k in (1, 3, 7)}
    assert fit_alpha(made) == 0.62
    # Later drafts are accepted less often, so no single alpha fits: too low first, too high last.
    fading = {1: 1.7, 3: 2.2, 7: 2.4}
    alpha = fit_alpha(fading)
    misfit = {k: tau - geometric_tau(alpha, k) for k, tau in fading.items()}
    assert misfit[1] > 0.03
    assert misfit[7] < -0.03
    with pytest.raises(ValueError, match="no tau"):
        fit_alpha({})


def test_repeats_weigh_only_where_they_are_asked_for():
    accepted = [[2, 0], [1], []]
    assert tau_weighted(accepted, [1, 1, 5]) == tau(accepted)
    assert tau_weighted(accepted, [1, 3, 1]) == (4 + 3 * 2) / (2 + 3)
    assert tau_weighted([[7, 7], [0]], [1, 98]) == pytest.approx((16 + 98) / 100)
    with pytest.raises(ValueError, match="no rounds"):
        tau_weighted([[]], [3])


def test_rounds_of_production_may_miss_steps_without_drafts():
    assert traffic_rounds([3, 5], [7, 7], 7) == ([3, 1], [7, 7])
    assert traffic_rounds([3, 5], [7, 7], 12) == ([3, 5, 0], [7, 7, 0])
    assert traffic_rounds([], [], 1) == ([], [])
    assert traffic_rounds([], [], 4) == ([0, 0, 0], [0, 0, 0])
    assert traffic_rounds([2], [3], 2) == ([0], [3])


def test_rounds_of_production_make_up_its_tokens():
    rng = random.Random(3)
    for _ in range(200):
        drafted = [rng.randint(1, 7) for _ in range(rng.randint(0, 9))]
        accepted = [rng.randint(0, d) for d in drafted]
        tokens = rng.randint(1, 40)
        cut, offered = traffic_rounds(accepted, drafted, tokens)
        assert len(cut) == len(offered)
        assert sum(cut) + len(cut) + 1 == tokens
        assert all(0 <= a <= d for a, d in zip(cut, offered, strict=True))
