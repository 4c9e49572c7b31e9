"""Summaries of acceptance/ say what its lists say, for each shard once."""

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from jobs.base.config import load
from jobs.dataset import queries, shard_sums
from jobs.dataset.shard_sums import SCHEMAS
from store.schemas import ACCEPTANCE
from tests.helpers.store import fill
from tests.helpers.tables import add_rows


@pytest.fixture
def cfg(tmp_path):
    return load(None, [f"work={tmp_path}"])


BASE = dict.fromkeys(ACCEPTANCE.names) | {
    "origin": "replay",
    "target_id": "t",
    "conversation_id": "c",
    "finished_at": datetime(2026, 1, 1, 5, 59, tzinfo=UTC),
}


def row(name, accepted, drafted, **changes):
    return BASE | {"request_id": name, "accepted": accepted, "drafted": drafted} | changes


def ask(cfg, query):
    return queries.ask(cfg, query).to_pylist()


def files(cfg):
    return {path.name for path in cfg.path("summaries").rglob("*.parquet")}


def test_they_equal_the_lists(tmp_path_factory):
    cfg = fill(load(None, [f"work={tmp_path_factory.mktemp('store')}"]))
    for view, lists in (("production", "production"), ("acceptance", "acceptance")):
        sums = "sum(rounds)::int as r, sum(tokens_in_rounds)::int as t, count(*) as n"
        assert ask(cfg, f"select {sums} from {view}_requests") == ask(
            cfg, f"select {sums} from {lists}"
        )
        by_list = ask(
            cfg,
            f"""
            select domain, drafted, accepted, count(*) as n from (
                select domain, unnest(drafted) as drafted, unnest(accepted) as accepted from {lists}
            ) group by all order by all
            """,
        )
        counted = f"select domain, drafted, accepted, sum(rounds)::bigint as n from {view}_rounds"
        assert ask(cfg, f"{counted} group by all order by all") == by_list
    last = ask(cfg, "select sum(rounds)::int as n from acceptance_rounds where last")
    assert last == ask(cfg, "select count(*)::int as n from acceptance where rounds > 0")


def test_empty_missing_and_impossible_rounds(cfg):
    found = [
        row("none", [], []),
        row("null", None, None),
        row("two", [2, 0], [3, 1], log="l", version="1"),
        row("lengths", [1], [3, 3]),
        row("more", [4, 1], [3, 3]),
        row("less", [-1], [3]),
        row("last", [1], [3]),
    ]
    add_rows(cfg, "acceptance", found)
    columns = "request_id, rounds, tokens_in_rounds, drafts, most_drafted, sound"
    views = [f"select {columns} from {view}_requests" for view in ("acceptance", "production")]
    seen = {r.pop("request_id"): tuple(r.values()) for q in views for r in ask(cfg, q)}
    assert seen == {
        "none": (0, 0, 0, 0, True),
        "null": (0, 0, 0, 0, True),
        "two": (2, 4, 4, 3, True),
        "lengths": (1, 2, 6, 3, False),
        "more": (2, 7, 6, 3, False),
        "less": (1, 0, 3, 3, False),
        "last": (1, 2, 3, 3, True),
    }
    [production] = ask(cfg, "select * from production_rounds where last")
    assert (production["drafted"], production["accepted"], production["rounds"]) == (1, 0, 1)
    assert production["hour"] == datetime(2026, 1, 1, 5, tzinfo=UTC)
    assert ask(cfg, "select drafted, accepted, rounds from acceptance_rounds") == [
        {"drafted": 3, "accepted": 1, "rounds": 1}
    ]


def test_each_shard_is_read_once_and_forgotten_with_its_shard(cfg, monkeypatch):
    read = []
    real = shard_sums._sum_up
    monkeypatch.setattr(shard_sums, "_sum_up", lambda *a: [read.append(a[2]), real(*a)])
    count = "select count(*) as n from acceptance_requests"
    assert ask(cfg, count) == [{"n": 0}]
    add_rows(cfg, "acceptance", [row("a", [1], [3], batch="x")])
    assert [ask(cfg, count), ask(cfg, count)] == [[{"n": 1}], [{"n": 1}]]
    add_rows(cfg, "acceptance", [row("b", [1], [3], batch="y")])
    assert ask(cfg, count) == [{"n": 2}]
    assert sorted(read) == sorted(cfg.table("acceptance").shards())
    assert ask(cfg, "select count(*) as n from promotions") == [{"n": 0}]
    table = cfg.table("acceptance")
    new = pa.Table.from_pylist([row("c", [1], [3], batch="x")], schema=ACCEPTANCE)
    table.replace("batch", ["x"], [table.write(new)])
    assert [
        r["request_id"] for r in ask(cfg, "select request_id from acceptance_requests order by 1")
    ] == ["b", "c"]
    live = {name.removesuffix(".parquet") for name in table.shards()}
    assert files(cfg) == {f"{name}-{kind}.parquet" for name in live for kind in SCHEMAS}


def test_a_question_that_needs_none_makes_none(cfg):
    add_rows(cfg, "acceptance", [row("a", [1], [3])])
    ask(cfg, "select tau(accepted) as tau from acceptance")
    assert files(cfg) == set()


def test_batches_of_a_large_shard_are_put_together(cfg, monkeypatch):
    add_rows(cfg, "acceptance", [row(f"{i}", [i % 3], [3]) for i in range(50)])
    monkeypatch.setattr(shard_sums, "BATCH", 7)
    assert ask(cfg, "select sum(rounds)::int as n from acceptance_rounds") == [{"n": 50}]
    assert ask(cfg, "select count(distinct request_id) as n from acceptance_requests") == [
        {"n": 50}
    ]
