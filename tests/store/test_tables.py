"""store.tables: commits of many writers, versions, statistics, and what readers are told."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from store.place import Place, place_of
from store.schemas import TIMESTAMP
from store.tables import Conflict, Table

SCHEMA = pa.schema(
    [("n", pa.int32()), ("log", pa.string()), ("ids", pa.list_(pa.int32())), ("at", TIMESTAMP)]
)
AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


@pytest.fixture
def table(work_url) -> Table:
    return Table(place_of(work_url) / "some", SCHEMA)


def rows(log: str, *numbers: int) -> pa.Table:
    values = [{"n": n, "log": log, "ids": [n, n], "at": AT} for n in numbers]
    return pa.Table.from_pylist(values, schema=SCHEMA)


def numbers(table: Table, version: int | None = None) -> list[int]:
    return sorted(table.read(["n"], version=version)["n"].to_pylist())


def test_an_absent_table_is_empty(table):
    assert table.version() is None
    assert table.shards() == {}
    assert table.read().schema == SCHEMA
    assert table.dataset().count_rows() == 0


def test_versions_stay_readable(table):
    first = table.append(rows("a", 1, 2), {"why": "first"})
    second = table.append(rows("b", 3))
    assert (numbers(table, first), numbers(table, second)) == ([1, 2], [1, 2, 3])
    assert table.note(first)["why"] == "first"
    assert table.read(where=pc.field("log") == "b").to_pylist() == rows("b", 3).to_pylist()


def test_replaced_rows_are_replaced_once(table):
    table.append(rows("a", 1, 2))
    table.append(pa.concat_tables([rows("b", 3), rows("a", 4), rows("c", 5)]))
    shard = table.write(rows("a", 9))
    version = table.replace("log", ["a", "c"], [shard])
    assert numbers(table) == [3, 9], "also the rows in a shard that has others"
    assert table.replace("log", ["a", "c"], [shard]) == version, "nothing to do"
    table.replace("log", ["a"], [])
    assert numbers(table) == [3]


def test_shards_are_named_after_their_content(table):
    assert table.write(rows("a", 1)) == table.write(rows("a", 1))
    assert table.write(rows("a", 1)) != table.write(rows("a", 2))
    assert len(list(table.place.objects())) == 2


def test_statistics_are_those_of_delta_lake(table):
    shard = table.write(rows("a", 3, 1))
    table.append(rows("a", 3, 1))
    assert table.shards() == {shard.name: shard}
    assert (shard.low["n"], shard.high["n"], shard.low["at"]) == (1, 3, AT)


def test_twenty_writers_lose_nothing(table):
    with ThreadPoolExecutor(20) as pool:
        versions = list(pool.map(lambda i: table.append(rows(f"w{i}", i)), range(20)))
    assert len(set(versions)) == 20
    assert numbers(table) == list(range(20))


def test_one_of_twenty_changes_a_version(table):
    version = table.append(rows("a", 100))
    shards = [table.write(rows("b", i)) for i in range(20)]

    def attempt(i: int) -> bool:
        try:
            table.change(lambda live: ([shards[i]], []), expect=version)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(20) as pool:
        won = list(pool.map(attempt, range(20)))
    assert won.count(True) == 1
    assert numbers(table) == [won.index(True), 100]


def test_racing_replacements_leave_one(table):
    table.append(rows("a", 0))
    shards = [table.write(rows("a", i)) for i in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda shard: table.replace("log", ["a"], [shard]), shards))
    assert len(numbers(table)) == 1


def test_a_confirmation_that_came_too_late_is_still_a_commit(table, monkeypatch):
    """The store committed but its answer was lost: the library sends again and finds its own."""
    from deltalake.exceptions import CommitFailedError

    table.append(rows("a", 1))
    real = DeltaTable.create_write_transaction

    def late(self, *args, **kwargs):
        real(self, *args, **kwargs)
        raise CommitFailedError("version exists")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", late)
    version = table.version()
    assert version is not None
    shard = table.write(rows("b", 2))
    assert table.change(lambda live: ([shard], []), expect=version) == version + 1
    assert numbers(table) == [1, 2]


def test_a_later_column_is_null_in_older_shards(table):
    table.append(rows("a", 1))
    later = Table(table.place, pa.schema([*SCHEMA, ("more", pa.string())]))
    assert later.read(["n", "more"]).to_pylist() == [{"n": 1, "more": None}]
    later.append(rows("b", 2).append_column("more", pa.array(["x"])))
    assert later.read(["more"])["more"].to_pylist().count("x") == 1
    assert numbers(table) == [1, 2], "and the former code reads on"


def test_a_check_is_made_again_before_each_commit(table):
    """A writer that was frozen finds out, also if it loses its first commit to its successor."""
    table.append(rows("a", 1))
    asked = []

    def check():
        asked.append(1)
        if len(asked) == 1:
            table.append(rows("b", 2))  # the successor commits first
        else:
            raise ValueError("the lease has ended")

    with pytest.raises(ValueError, match="the lease has ended"):
        table.under(check).append(rows("c", 3))
    assert (len(asked), numbers(table)) == (2, [1, 2])


def test_what_is_committed_during_the_listing_is_not_lost(table, monkeypatch):
    table.append(rows("a", 1))
    real = Place.objects

    def late(place, prefix=""):
        found = list(real(place, prefix))
        if len(table.shards()) == 1:
            table.replace("log", ["a"], [table.write(rows("a", 1, 2))])
        return iter(found)

    monkeypatch.setattr(Place, "objects", late)
    assert table.lost() == []
    assert numbers(table) == [1, 2]


def test_a_lost_shard_is_named(table):
    table.append(rows("a", 1))
    [name] = table.shards()
    assert table.lost() == []
    table.place.delete([name])
    assert [shard.name for shard in table.lost()] == [name]
    with pytest.raises(OSError, match=r"some: a file of this version is gone .*flywheel ingest"):
        table.read()


def test_a_version_that_never_was_is_named(table):
    table.append(rows("a", 1))
    with pytest.raises(OSError, match="some"):
        table.read(version=77)


def test_an_identity_that_may_not_write_is_told(s3, bucket, monkeypatch):
    table = Table(place_of(bucket) / "some", SCHEMA)
    shard = table.write(rows("a", 1))
    for name, value in s3.readonly_env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PermissionError, match="check the permissions"):
        table.change(lambda live: ([shard], []))


EARLY = """
import sys
import duckdb
from store.place import place_of
from tests.store.test_tables import SCHEMA, Table
table = Table(place_of(sys.argv[1]) / "some", SCHEMA)
next(table.batches(["n"]))
with duckdb.connect() as connection:
    connection.register("t", table.dataset())
    print(connection.sql("select n from t limit 1").fetchall())
"""


def test_a_scan_that_ends_early_does_not_end_in_a_crash(table):
    """With deltalake's own file system, nearly every such process crashed or hung at its exit."""
    for i in range(20):
        table.append(rows("a", i))
    for _ in range(3):
        command = [sys.executable, "-c", EARLY, table.place.root]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
