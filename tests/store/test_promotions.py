"""Decisions about champions: numbered, none lost, and none of a holder that was replaced."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from store import promotions
from store.lease import Lost, take
from store.place import place_of
from store.schemas import PROMOTIONS
from store.tables import Table


@pytest.fixture
def table(work_url):
    return Table(place_of(work_url) / "promotions", PROMOTIONS)


@pytest.fixture
def place(work_url):
    return place_of(work_url) / "lease"


def test_a_record_that_was_late_by_a_hair_is_fenced(table, place, monkeypatch):
    """Suspended after its last look at the lease, right before the commit."""
    early = promotions.Decisions(table, take(place))
    early.held.release()
    monkeypatch.setattr(early.held, "check", lambda: None)
    later = promotions.Decisions(table, take(place))
    with pytest.raises(Lost, match="a later holder has begun"):
        early.append({"action": "promote", "to_version": "1"})
    assert later.append({"action": "refuse"})["number"] == 1
    assert later.append({"action": "promote"})["lease"] == later.held.number == 2
    promotions.append(table, {"action": "refuse"})  # a migration, say: no lease, no harm
    assert later.append({"action": "promote"})["number"] == 4
    assert [r["lease"] for r in promotions.read(table)] == [2, 2, None, 2]


def test_twenty_racing_decisions_get_twenty_numbers(table):
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda i: promotions.append(table, {"action": f"a{i}"}), range(20)))
    rows = promotions.read(table)
    assert [row["number"] for row in rows] == list(range(1, 21))
    assert {row["action"] for row in rows} == {f"a{i}" for i in range(20)}


def test_evidence_is_kept_and_unknown_columns_are_refused(table):
    assert promotions.read(table) == []
    promotions.append(table, {"action": "promote", "evidence": {"tau": [1, 2.5]}})
    [row] = promotions.read(table)
    assert (row["evidence"], row["number"], row["lease"]) == ({"tau": [1, 2.5]}, 1, None)
    with pytest.raises(ValueError, match="no such column in promotions: acton"):
        promotions.append(table, {"acton": "promote"})


def test_a_holder_that_ended_before_it_began_decides_nothing(table, place):
    held = take(place, seconds=0.1)
    time.sleep(0.2)
    with pytest.raises(Lost):
        promotions.Decisions(table, held)
    assert table.version() is None
