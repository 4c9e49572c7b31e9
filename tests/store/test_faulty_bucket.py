"""A bucket that fails for a while, or for good: work goes on, or one message says what to do."""

from datetime import timedelta

import pyarrow as pa
import pytest

from store import arrow_files, place, tables
from store.lease import lease
from store.place import place_of
from store.tables import Table
from tests.helpers.faulty_s3 import faulty

SCHEMA = pa.schema([("n", pa.int32())])


@pytest.fixture
def proxy(s3, s3_env, monkeypatch):
    """A proxy before the server that fails on demand; this process's environment leads to it."""
    with faulty(s3) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.endpoint)
        place._store.cache_clear()
        arrow_files.files_of.cache_clear()
        yield found
    place._store.cache_clear()
    arrow_files.files_of.cache_clear()


@pytest.fixture
def table(proxy, s3) -> Table:
    made = Table(place_of(s3.url()) / "some", SCHEMA)
    made.append(rows(1))
    return made


def rows(*numbers: int) -> pa.Table:
    return pa.table({"n": pa.array(numbers, pa.int32())})


def test_a_bucket_that_is_busy_for_a_while_delays_and_loses_nothing(proxy, table):
    for number, kind in enumerate(("slow down", "lost answer", "cut"), 2):
        proxy.fail(kind, seconds=2)
        version = table.append(rows(number))
        proxy.heal()
        assert version == number
    proxy.fail("slow down", seconds=2)
    assert sorted(table.read()["n"].to_pylist()) == [1, 2, 3, 4]
    proxy.fail("slow down", seconds=2)
    with lease(table.place / "lease") as held:
        held.check()


def test_a_bucket_that_stays_busy_is_one_message(proxy, table, monkeypatch):
    monkeypatch.setitem(tables.OPTIONS, "retry_timeout", "1s")
    monkeypatch.setitem(place.RETRIES, "retry_timeout", timedelta(seconds=1))
    place._store.cache_clear()
    proxy.fail("slow down", seconds=60)
    for call in (table.version, lambda: table.write(rows(2)), lambda: table.place.read("x")):
        with pytest.raises(OSError, match=r"run (again|the same command again)") as found:
            call()
        assert "\n" not in str(found.value)
        assert str(table.place) in f"{found.value} {found.value.filename}"


def test_a_refused_commit_is_one_message(proxy, table):
    shard = table.write(rows(2))
    proxy.fail("denied", methods=["PUT"], under="_delta_log", seconds=60)
    with pytest.raises(PermissionError, match="check the permissions of this place"):
        table.change(lambda live: ([shard], []))
    proxy.heal()
    assert table.read()["n"].to_pylist() == [1]
