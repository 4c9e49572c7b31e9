"""Identifiers follow from content and never change between runs or machines."""

import pytest

from store.ids import prompt_conversation, sample_id, split_of


def test_sample_id_is_stable():
    assert sample_id("t", [1, 2], [3]) == "5ab6080e98f2c09cd5877a7659eeb168"


def test_sample_id_depends_on_target_and_boundary():
    ids = {sample_id("t", [1, 2], [3]), sample_id("t", [1], [2, 3]), sample_id("u", [1, 2], [3])}
    assert len(ids) == 3


def test_split_shares_and_stability():
    splits = [split_of(f"c{i}", 10, 5) for i in range(20_000)]
    assert 0.09 < splits.count("val") / 20_000 < 0.11
    assert 0.04 < splits.count("test") / 20_000 < 0.06
    assert splits == [split_of(f"c{i}", 10, 5) for i in range(20_000)]


def test_test_set_does_not_move_when_the_val_share_changes():
    for i in range(2000):
        assert (split_of(f"c{i}", 0, 10) == "test") == (split_of(f"c{i}", 30, 10) == "test")


def test_zero_shares_mean_none():
    assert {split_of(f"c{i}", 0, 0) for i in range(500)} == {"train"}


@pytest.mark.parametrize("shares", [(60, 40), (-1, 10)])
def test_impossible_shares_are_refused(shares):
    with pytest.raises(ValueError, match="below 100"):
        split_of("c", *shares)


def test_equal_prompts_share_a_conversation():
    assert prompt_conversation([1, 2]) == prompt_conversation([1, 2]) != prompt_conversation([1])
