"""What the code relies on in obstore and in S3, and that the tests' server and proxy show it."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError
from obstore.store import from_url
from pyarrow.fs import FileSystem

from tests.helpers.faulty_s3 import faulty
from tests.helpers.s3 import open_store

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

PATIENT: "RetryConfig" = {
    "max_retries": 1000,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"max_backoff": timedelta(seconds=0.5)},
}


@pytest.fixture(params=["bucket", "folder"])
def store(request, tmp_path):
    if request.param == "folder":
        return from_url(f"file://{tmp_path}")
    return from_url(request.getfixturevalue("s3_env").url())


def test_one_of_twenty_creators_wins(store):
    def create(number: int) -> bool:
        try:
            obstore.put(store, "lease/1", str(number).encode(), mode="create")
        except AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(20) as threads:
        won = list(threads.map(create, range(20)))
    assert sum(won) == 1
    assert obstore.get(store, "lease/1").bytes() == str(won.index(True)).encode()


def test_the_reader_may_not_write(s3):
    url = s3.url()
    obstore.put(open_store(url, s3.env), "a", b"1")
    store = open_store(url, s3.readonly_env)
    assert obstore.get(store, "a").bytes() == b"1"
    for mode in ("overwrite", "create"):
        with pytest.raises(PermissionDeniedError):
            obstore.put(store, "b", b"2", mode=mode)


@pytest.fixture
def proxy(s3, s3_env, monkeypatch):
    with faulty(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def test_all_three_clients_sign_for_the_proxy(proxy):
    url, table = proxy.url(), pa.table({"x": [1, 2]})
    write_deltalake(f"{url}/table", table)
    files, root = FileSystem.from_uri(url)
    path = f"{root}/a b/ü=1.parquet"
    pq.write_table(table, path, filesystem=files)
    assert DeltaTable(f"{url}/table").to_pyarrow_table() == table
    assert pq.read_table(path, filesystem=files) == table
    assert obstore.head(from_url(url), "a b/ü=1.parquet")["size"] > 0
    assert {kind for _, _, kind in proxy.seen()} == {None}


def test_an_outage_of_two_seconds_is_ridden_out(proxy):
    store = from_url(proxy.url(), retry_config=PATIENT)
    proxy.fail("slow down", seconds=2)
    start = time.monotonic()
    obstore.put(store, "a", b"1", mode="create")
    assert time.monotonic() - start > 1.5
    assert obstore.get(store, "a").bytes() == b"1"
    assert [kind for _, _, kind in proxy.seen()].count("slow down") >= 3


def test_a_refusal_is_not_tried_again(proxy):
    store = from_url(proxy.url(), retry_config=PATIENT)
    proxy.fail("denied", methods=("PUT",), under="/closed/")
    with pytest.raises(PermissionDeniedError):
        obstore.put(store, "closed/a", b"1")
    obstore.put(store, "open/a", b"1")
    assert [kind for _, _, kind in proxy.seen()] == ["denied", None]


@pytest.mark.parametrize(("kind", "there"), [("cut", False), ("lost answer", True)])
def test_a_creator_whose_connection_breaks_does_not_know_whether_it_won(proxy, kind, there):
    store = from_url(proxy.url(), retry_config=PATIENT)
    proxy.fail(kind, requests=1)
    with pytest.raises(GenericError, match="error sending request"):
        obstore.put(store, "lease", b"mine", mode="create")
    assert [item["path"] for item in obstore.list(store).collect()] == ["lease"] * there


def test_a_read_goes_on_where_the_connection_broke(proxy):
    store, data = from_url(proxy.url()), os.urandom(2 << 20)
    obstore.put(store, "a", data)
    proxy.fail("half answer", requests=1, methods=("GET",))
    assert obstore.get(store, "a").bytes() == data


def test_a_frozen_server_is_given_up_after_the_timeout(proxy):
    options: ClientConfig = {"allow_http": True, "timeout": "0.5s"}
    url = proxy.url()
    proxy.fail("freeze")
    with pytest.raises(GenericError):
        obstore.get(from_url(url, client_options=options, retry_config={"max_retries": 1}), "a")
    proxy.heal()
    with pytest.raises(FileNotFoundError):
        obstore.get(from_url(url), "a")


def test_a_killed_test_run_leaves_no_server(tmp_path):
    code = """
import sys, time
from pathlib import Path
from tests.helpers import s3
with s3.running(Path(sys.argv[1])):
    print("up", flush=True)
    time.sleep(300)
"""
    run = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert run.stdout
    assert run.stdout.readline() == "up\n"
    assert servers(tmp_path)
    run.send_signal(signal.SIGKILL)
    run.wait()
    deadline = time.monotonic() + 30
    while (left := servers(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def servers(folder: Path) -> list[int]:
    """The processes that name `folder` in their command line, without those of the tests."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "weed" in str(process.info["cmdline"]) and str(folder) in str(process.info["cmdline"])
    ]
