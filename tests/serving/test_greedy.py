"""Texts with a drafter judged by two runs without it."""

import random

import pytest

from serving.greedy import LEVEL, Difference, Texts, fisher, judge


def texts(requests, gaps):
    return Texts(
        requests=requests,
        differences=[
            Difference(index=i, position=3, plain_id=1, drafted_id=2, gap=gap)
            for i, gap in enumerate(gaps)
        ],
    )


def test_identical_texts_are_lossless():
    report = judge(texts(8, []), texts(8, []), 0.5)
    assert (report.identical, report.different, report.chance) == (8, [], 1.0)


def test_what_the_control_shows_is_no_alarm():
    """29 requests in bfloat16: 13 differ with a drafter, 11 without, gaps on quantised steps."""
    control = texts(29, [0.0, 0.125, 0.25, 0.25, 0.5, 0.125, 0.25, 0.125, 0.0, 0.625, 0.125])
    drafted = texts(29, [0.125, 0.25, 0.25, 0.25, 0.625, *[0.125] * 8])
    report = judge(control, drafted, 0.25)
    assert report.different == []
    assert len(report.near_ties) == 13
    assert report.bound == 0.625


@pytest.mark.parametrize("gap", [2.0, None])
def test_one_difference_that_no_tie_explains_is_different(gap):
    """A gap beyond the control and the bound, or a token outside the top: one is enough."""
    report = judge(texts(29, [0.5, 0.25]), texts(29, [0.25, gap]), 0.5)
    assert [d.gap for d in report.different] == [gap]
    assert [d.gap for d in report.near_ties] == [0.25]


def test_more_ties_than_the_control_has_are_different_too():
    """Every gap is small, but the drafter decides ties that two plain runs decide alike."""
    report = judge(texts(29, [0.1]), texts(29, [0.1 + i / 100 for i in range(14)]), 0.5)
    assert report.chance < LEVEL
    assert len(report.different) == 13
    assert [d.gap for d in report.near_ties] == [0.1], "the largest gaps are the excess"


def test_equal_rates_are_no_alarm_in_ten_thousand_draws():
    draw = random.Random(0)
    for rate in (0.02, 0.4):
        hits = [[sum(draw.random() < rate for _ in range(29)) for _ in "ab"] for _ in range(5000)]
        alarms = sum(fisher(a, 29, b, 29) < LEVEL for a, b in hits)
        assert alarms <= 5000 * 2 * LEVEL


def test_fisher_is_the_hypergeometric_tail():
    assert fisher(5, 5, 0, 5) == pytest.approx(1 / 252)
    assert fisher(0, 5, 3, 5) == 1.0
    assert fisher(0, 0, 0, 0) == 1.0
