"""The feed is bounded, says what it lost, and counts by position."""

import pytest
from prometheus_client import REGISTRY

from serving import acceptance_feed
from serving.acceptance_feed import Feed, _at_least


@pytest.fixture
def feed(monkeypatch):
    monkeypatch.setattr(acceptance_feed, "MAX_ROWS", 10)
    monkeypatch.setattr(acceptance_feed, "MAX_ROUNDS", 50)
    monkeypatch.setattr(acceptance_feed, "MOST_ROWS", 4)
    return Feed()


def add(feed, rounds=1, label="t/0", accepted=1):
    row = {"accepted": [accepted] * rounds, "drafted": [7] * rounds, "output_tokens": 9}
    feed.add(label, row)


def numbers(answer):
    return [row["seq"] for row in answer["rows"]]


def test_a_reader_that_goes_on_where_it_was_sees_each_row_once(feed):
    for _ in range(6):
        add(feed)
    first = feed.read(0)
    assert (numbers(first), first["next"], first["lost"]) == ([1, 2, 3, 4], 4, 0)
    second = feed.read(first["next"])
    assert (numbers(second), second["next"]) == ([5, 6], 6)
    last = feed.read(6)
    assert (last["rows"], last["next"], last["lost"]) == ([], 6, 0)


def test_the_oldest_rows_are_lost_and_counted(feed):
    for _ in range(25):
        add(feed)
    answer = feed.read(3)
    assert (numbers(answer)[0], answer["lost"]) == (16, 12)
    assert len(feed.rows) == 10


def test_huge_lists_of_rounds_push_out_others_but_the_newest_stays(feed):
    for _ in range(5):
        add(feed, rounds=10)
    assert len(feed.rows) == 5
    add(feed, rounds=45)
    assert [len(row["accepted"]) for row in feed.rows] == [45]
    add(feed, rounds=100_000)
    assert (len(feed.rows), feed.rounds) == (1, 100_000)
    add(feed)
    assert (len(feed.rows), feed.rounds) == (1, 1)


@pytest.mark.parametrize("after", [-1, 7, 10**30])
def test_a_place_of_a_former_process_means_the_beginning(feed, after):
    add(feed)
    assert numbers(feed.read(after)) == [1]


def test_rounds_by_position():
    assert _at_least([2, 0, 1]) == [2, 1]
    assert _at_least([]) == _at_least([0, 0]) == []
    assert _at_least([40, 1]) == [2] + [1] * 31


def value(name, **labels):
    return REGISTRY.get_sample_value(name, labels)


def test_counters_by_position(feed):
    add(feed, rounds=3, label="p/1", accepted=2)
    add(feed, rounds=1, label="p/1", accepted=0)
    offered, accepted = "flywheel_drafts_offered_total", "flywheel_drafts_accepted_total"
    assert [value(offered, drafter="p/1", position=str(i)) for i in (1, 7)] == [4, 4]
    assert [value(accepted, drafter="p/1", position=str(i)) for i in (1, 2)] == [3, 3]
    assert value(accepted, drafter="p/1", position="3") is None
    assert value("flywheel_rounds_total", drafter="p/1") == 4
    assert value("flywheel_tokens_total", drafter="p/1") == 18


def test_series_of_drafters_long_gone_are_removed(feed):
    for version in range(40):
        feed.count(f"v{version}/x", "finished")
        add(feed, label=f"v{version}/x")
    names = [f"v{version}/x" for version in range(40)]
    kept = [n for n in names if value("flywheel_rounds_total", drafter=n)]
    assert kept == names[-acceptance_feed.LABELS :]
    offered = [value("flywheel_drafts_offered_total", drafter=n, position="1") for n in names]
    assert [n for n in names if offered[names.index(n)]] == kept


def test_failures_are_counted(feed):
    feed.count("f/0", "failed")
    feed.count("f/0", "finished")
    assert [feed.read(0)[name] for name in ("requests", "failed")] == [2, 1]
