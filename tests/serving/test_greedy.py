"""Texts with a drafter, judged by how the plain server reads them and its own answers again."""

import random

import pytest

from serving.client import Completion
from serving.greedy import LEVEL, Reading, fisher, judge

TOKENS, REQUESTS = 80, 29


def completion(output):
    return Completion(
        request_id="r",
        prompt_ids=[1, 2],
        output_ids=output,
        text="",
        finish_reason="length",
        spec=None,
        top_logprobs=[],
        started=0.0,
        seconds=0.0,
        decode_seconds=None,
    )


def texts(parting):
    """REQUESTS plain answers, and drafted ones that differ from token 40 on in `parting`."""
    plain = [completion([5] * TOKENS) for _ in range(REQUESTS)]
    drafted = [
        completion([5] * 40 + [6] * 40) if i in parting else one for i, one in enumerate(plain)
    ]
    return plain, drafted


def reading(**gaps):
    """Gaps by answer: r3=[.1, .2] are those of the last tokens of answer 3; all others are 0."""
    found = [[0.0] * TOKENS for _ in range(REQUESTS)]
    for name, some in gaps.items():
        found[int(name[1:])][-len(some) :] = some
    return Reading(gaps=found)


def test_identical_texts_are_lossless():
    report = judge(*texts([]), reading(r1=[0.5]), reading(r1=[0.5]), 0.25)
    assert (report.identical, report.near_ties, report.different) == (REQUESTS, [], [])


def test_what_the_plain_server_says_to_its_own_answers_is_no_alarm():
    """As for the 135M target in bfloat16: half of the texts differ, and gaps are multiples of the
    rounding step, up to 0.625.
    """
    control = reading(r0=[0.125] * 12, r1=[0.25] * 8, r2=[0.625, 0.5])
    drafted = reading(r3=[0.625], r4=[0.25] * 9, r5=[0.125] * 14)
    report = judge(*texts(range(13)), control, drafted, 0.25)
    assert report.different == []
    assert (report.identical, len(report.near_ties)) == (16, 13)
    assert (report.bound, report.control.lost, report.drafted.lost) == (0.625, 22, 24)


def test_one_token_that_no_tie_explains_is_different():
    """One such token is enough, anywhere after the first difference."""
    report = judge(*texts([3, 4]), reading(r0=[0.5]), reading(r3=[0.25], r4=[2.0, 0.0]), 0.5)
    [wrong] = report.different
    assert (wrong.index, wrong.position, wrong.plain_id, wrong.drafted_id) == (4, 40, 5, 6)
    assert wrong.gap == 2.0
    assert [d.gap for d in report.near_ties] == [0.25]


def test_an_answer_that_is_cut_off_is_different():
    plain, drafted = texts([])
    drafted[0] = completion([5] * 10)
    report = judge(plain, drafted, reading(), reading(), 0.5)
    assert [(d.index, d.drafted_id, d.gap) for d in report.different] == [(0, None, None)]


def test_more_lost_tokens_than_the_control_has_are_different_too():
    """Every gap is small, but many more tokens are lost with the drafter than in the control."""
    few, many = reading(r0=[0.1] * 5), reading(r3=[0.1] * 30)
    report = judge(*texts([3]), few, many, 0.5)
    assert report.chance < LEVEL
    assert [d.index for d in report.different] == [3]
    assert judge(*texts([3]), many, few, 0.5).different == [], "fewer are no fault"


def test_other_prompts_cannot_be_compared():
    plain, drafted = texts([0])
    drafted[0].prompt_ids.append(3)
    with pytest.raises(ValueError, match="request 0: the two servers were asked with different"):
        judge(plain, drafted, reading(), reading(), 0.5)


def test_equal_rates_are_no_alarm():
    draw = random.Random(0)
    for rate in (0.0005, 0.01):
        hits = [[sum(draw.random() < rate for _ in range(2000)) for _ in "ab"] for _ in range(1000)]
        alarms = sum(fisher(a, 2000, b, 2000) < LEVEL for a, b in hits)
        assert alarms <= 1000 * 4 * LEVEL


def test_fisher_is_the_hypergeometric_tail():
    assert fisher(5, 5, 0, 5) == pytest.approx(1 / 252)
    assert fisher(0, 5, 3, 5) == 1.0
    assert fisher(0, 0, 0, 0) == 1.0
