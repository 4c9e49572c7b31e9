"""Rounds of captures in acceptance/: once, with their log, apart from what commands measured."""

import json
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import store.log_to_traffic
from jobs import gc, ingest
from jobs.dataset import queries
from jobs.dataset.acceptance_rows import commit_rows
from jobs.ingestion import publishing
from store.schemas import ACCEPTANCE
from tests.helpers.capture_logs import (
    DRAFTER,
    in_this_process,
    line,
    samples,
    served,
    write_log,
)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    in_this_process(monkeypatch)


def names(cfg) -> list[str]:
    rows = cfg.table("acceptance").read(["request_id", "log"]).to_pylist()
    return sorted(row["request_id"] for row in rows if row["log"])


def measured(cfg):
    """Rows of a command, of origin served."""
    row = dict.fromkeys(ACCEPTANCE.names) | {
        "request_id": "verify-1",
        "origin": "served",
        "drafter_version": DRAFTER[:12],
        "target_id": "t",
        "k": 7,
        "temperature": 0.0,
        "accepted": [7],
        "drafted": [7],
    }
    commit_rows(cfg, [row], {"origin": "served", "split": "test"})
    return row


def test_a_grown_log_replaces_its_rows_and_no_others(anywhere):
    cfg = anywhere()
    measured(cfg)
    write_log(cfg, "a.jsonl", [served(1), line(2), served(3, accepted=None, drafted=None)])
    write_log(cfg, "b.jsonl", [served(9)])
    ingest.run(cfg)
    assert names(cfg) == ["r1", "r9"]
    version = cfg.table("acceptance").version()
    ingest.run(cfg)
    assert cfg.table("acceptance").version() == version
    write_log(cfg, "a.jsonl", [served(4)], "a")
    ingest.run(cfg)
    assert names(cfg) == ["r1", "r4", "r9"]
    rows = cfg.table("acceptance").read().to_pylist()
    assert sorted(row["request_id"] for row in rows) == ["r1", "r4", "r9", "verify-1"]
    assert {row["log"] is None for row in rows if row["request_id"] == "verify-1"} == {True}
    assert all(row["batch"] == row["log"] for row in rows if row["log"])
    known = samples(cfg)
    assert all(row["sample_id"] in known for row in rows if row["log"])


def test_equal_answers_are_one_sample_and_two_requests(anywhere):
    cfg = anywhere()
    write_log(cfg, "a.jsonl", [served(1), served(1, request_id="again")])
    ingest.run(cfg)
    assert list(samples(cfg).values()) == [2]
    assert names(cfg) == ["again", "r1"]
    rows = cfg.table("acceptance").read(["repeat_count"]).to_pylist()
    assert rows == [{"repeat_count": 1}] * 2


def test_records_that_are_not_used_give_no_row(anywhere):
    cfg = anywhere("ingest.max_reject_rate=1")
    refused = served(1, consent=False), served(2, target_id="another"), served(3, adapter="lora")
    damaged = served(4, accepted=[5, 5]), served(5, output_ids=[4, 999_999_999, 6, 7])
    short = served(6, output_ids=[4], accepted=[], drafted=[])
    write_log(cfg, "a.jsonl", [*refused, *damaged, short, served(7)])
    assert ingest.run(cfg)["accepted"] == 1
    assert names(cfg) == ["r7"]


def test_a_run_that_ends_between_the_tables_is_made_good_by_the_next(anywhere, monkeypatch):
    cfg = anywhere()
    write_log(cfg, "a.jsonl", [served(1)])
    ingest.run(cfg)
    write_log(cfg, "a.jsonl", [served(2)], "a")
    replace = publishing.Publisher._replace

    def stop(self, table, *more):
        if table.place.name == "acceptance":
            raise KeyboardInterrupt
        replace(self, table, *more)

    with monkeypatch.context() as killed:
        killed.setattr(publishing.Publisher, "_replace", stop)
        with pytest.raises(KeyboardInterrupt):
            ingest.run(cfg)
    assert names(cfg) == ["r1"]
    assert gc.run(cfg.override("gc", days=0))["stage"] == "gc"
    ingest.run(cfg)
    assert names(cfg) == ["r1", "r2"]
    assert not [*cfg.place("ingesting").objects()]


def test_rows_of_an_older_reading_are_deleted_at_once(anywhere, monkeypatch):
    cfg = anywhere()
    measured(cfg)
    write_log(cfg, "a.jsonl", [served(1)])
    with monkeypatch.context() as older:
        older.setattr(store.log_to_traffic, "READING", 1)
        older.setattr(publishing, "READING", 1)
        ingest.run(cfg)
    before = set(cfg.table("acceptance").shards())
    ingest.run(cfg)
    assert names(cfg) == ["r1"]
    there = {found.name for found in cfg.place("acceptance").objects() if "/" not in found.name}
    assert len(before - there) == 1, "the shard with rows of the former reading"
    assert set(cfg.table("acceptance").shards()) == there


def test_a_table_from_before_these_columns_stays_readable_and_gets_them(anywhere):
    cfg = anywhere()
    former = pa.schema([f for f in ACCEPTANCE if f.name not in ("log", "version", "concurrency")])
    table = cfg.table("acceptance")
    old = type(table)(table.place, former)
    row = dict.fromkeys(former.names) | {"request_id": "old", "origin": "replay", "batch": "x"}
    old.append(pa.Table.from_pylist([row], schema=former))
    [shard] = old.shards()
    assert "log" not in pq.read_schema(cfg.place("acceptance").open(shard)).names
    write_log(cfg, "a.jsonl", [served(1)])
    ingest.run(cfg)
    rows = cfg.table("acceptance").read(["request_id", "log"]).to_pylist()
    assert {row["request_id"]: bool(row["log"]) for row in rows} == {"old": False, "r1": True}
    assert shard in cfg.table("acceptance").shards()
    assert queries.ask(cfg, "select request_id from acceptance").to_pylist() == [
        {"request_id": "old"}
    ]


def test_a_log_without_rounds_makes_no_table(anywhere):
    cfg = anywhere()
    write_log(cfg, "a.jsonl", [line(1)])
    ingest.run(cfg)
    assert cfg.table("acceptance").version() is None


def test_a_marker_of_an_earlier_release_is_still_good(anywhere, monkeypatch):
    cfg = anywhere()
    write_log(cfg, "a.jsonl", [line(1)])
    with monkeypatch.context() as refused:
        refused.setattr(ingest, "check_counts", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ingest.run(cfg)
    [marker] = cfg.place("ingesting").objects()
    value = json.loads(cfg.place("ingesting").read(marker.name))
    del value["acceptance"]
    cfg.place("ingesting").write(marker.name, json.dumps(value).encode())
    assert ingest.run(cfg)["reused"] == 1


def test_many_rows_are_written_in_shards(anywhere, monkeypatch):
    monkeypatch.setattr(store.log_to_traffic, "SHARD_ROWS", 10)
    cfg = anywhere()
    write_log(cfg, "a.jsonl", [served(i) for i in range(95)])
    ingest.run(cfg)
    assert len(cfg.table("acceptance").shards()) == 10
    assert len(names(cfg)) == 95


def test_questions_keep_production_and_measurement_apart(anywhere):
    cfg = anywhere()
    measured(cfg)
    write_log(cfg, "a.jsonl", [served(i, temperature=0) for i in range(6)])
    ingest.run(cfg)
    for question in ("tau_by_domain_and_version", "acceptance_by_position", "where_rounds_end"):
        rows = queries.ask(cfg, queries.find_question(question).read_text()).to_pylist()
        assert {row.get("requests", row.get("rounds")) for row in rows} == {1}, question
    question = queries.Question.read(queries.find_question("served_acceptance"))
    found = queries.ask_question(cfg, question, {}).to_pylist()
    assert {(r["replica"], r["version"], r["drafter_version"]) for r in found} == {
        ("east", "7", DRAFTER[:12]),
        ("west", "7", DRAFTER[:12]),
    }
    assert {row["hour"] for row in found} == {datetime(2025, 12, 1, tzinfo=UTC)}
    every = [row for row in found if row["domain"] == "(all)" and row["replica"] == "west"]
    # West: [0 of 7, 0 of 3, 0 of 3], [2 of 7], [1 of 7, 0 of 3].
    at = {row["position"]: row for row in every}
    assert [at[k]["rounds_offered"] for k in (1, 3, 4, 7)] == [6, 6, 3, 3]
    assert [at[k]["accept_rate"] for k in (1, 2, 3)] == [pytest.approx(2 / 6), 1 / 6, 0]
    assert at[4]["accept_rate"] == 0
    assert (at[1]["requests"], at[1]["mean_concurrency"]) == (3, 3)
