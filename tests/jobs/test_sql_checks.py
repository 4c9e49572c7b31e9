"""Each check of sql/checks finds its damage, and nothing on a healthy store."""

import pytest

from jobs import doctor
from jobs.base.config import load
from jobs.dataset import queries
from jobs.machine import store_health
from tests.helpers.store import fill
from tests.helpers.tables import add_rows

Rows = list[dict]


def first(cfg, name, **where) -> dict:
    rows = cfg.table(name).read().to_pylist()
    return next(row for row in rows if all(row[n] == v for n, v in where.items()))


def impossible(cfg) -> tuple[str, Rows]:
    row = first(cfg, "acceptance", log=None, origin="replay", k=3)
    return "acceptance", [row | {"request_id": "bad", "drafted": [0] * len(row["drafted"])}]


def too_short(cfg) -> tuple[str, Rows]:
    row = first(cfg, "acceptance", log="log-1")
    return "acceptance", [row | {"request_id": "bad", "output_tokens": row["output_tokens"] + 1}]


def twice(cfg) -> tuple[str, Rows]:
    return "acceptance", [first(cfg, "acceptance", log=None, k=3) | {"batch": "another"}]


def unknown(cfg) -> tuple[str, Rows]:
    return "acceptance", [first(cfg, "acceptance", log="log-1") | {"log": "gone"}]


def two_sides(cfg) -> tuple[str, Rows]:
    row = first(cfg, "selection", split="test")
    other = first(cfg, "selection", split="train")
    return "selection", [other | {"conversation_id": row["conversation_id"]}]


def selected_twice(cfg) -> tuple[str, Rows]:
    return "selection", [first(cfg, "selection", split="train")]


def without_traffic(cfg) -> tuple[str, Rows]:
    row = first(cfg, "selection", split="train")
    return "selection", [row | {"sample_id": "gone"}]


def other_length(cfg) -> tuple[str, Rows]:
    row = first(cfg, "feature_index")
    return "feature_index", [row | {"n_tokens": row["n_tokens"] + 1, "features_key": "bad"}]


def lost(cfg) -> tuple[str, Rows]:
    return "promotions", [first(cfg, "promotions", number=4) | {"number": 6}]


DAMAGE = {
    "impossible_rounds": impossible,
    "tokens_without_a_round": too_short,
    "measured_twice": twice,
    "unknown_logs": unknown,
    "on_two_sides": two_sides,
    "selected_twice": selected_twice,
    "selected_without_traffic": without_traffic,
    "features_of_another_length": other_length,
    "lost_decisions": lost,
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return fill(load(None, [f"work={tmp_path_factory.mktemp('store')}"]))


def wrong(cfg) -> dict[str, Rows]:
    with queries.opened(cfg) as connection:
        found = {c.name: queries.answer(connection, c.query, c.name) for c in queries.checks()}
    return {name: rows.to_pylist() for name, rows in found.items() if rows.num_rows}


def test_every_check_has_its_damage_and_says_what_to_do():
    assert set(DAMAGE) == {check.name for check in queries.checks()}
    for check in queries.checks():
        assert "To do: " in check.comment, check.name


def test_a_healthy_store_has_nothing_wrong(healthy):
    assert wrong(healthy) == {}
    [found] = store_health.tables(healthy)
    assert (found.status, found.found) == ("ok", "9 checks of sql/checks find nothing wrong")


@pytest.mark.parametrize("name", DAMAGE)
def test_a_check_finds_its_damage(healthy, name):
    """One store for all: the damage is taken back by going on from the version before."""
    table, rows = DAMAGE[name](healthy)
    before = healthy.table(table).shards()
    add_rows(healthy, table, rows)
    try:
        found = wrong(healthy)
        assert name in found
        # A row that is there twice is also on one of the two sides: no other check may find more.
        assert set(found) - {name} <= {"selected_twice"}
    finally:
        healthy.table(table).change(lambda live: ([], [n for n in live if n not in before]))


def test_doctor_fails_with_the_rows_and_the_fix(healthy, capsys):
    add_rows(healthy, *impossible(healthy))
    [found] = store_health.tables(healthy)
    assert (found.status, found.name) == ("fail", "impossible_rounds")
    assert "rows 1" in found.found
    assert "flywheel evaluate" in found.fix
    assert store_health.tables in doctor.CHECKS


def test_a_folder_without_tables_is_skipped(tmp_path):
    [found] = store_health.tables(load(None, [f"work={tmp_path}"]))
    assert found.status == "skip"
