"""The S3 server of the tests, and what its clients do when it fails: a promise of the packages."""

from concurrent.futures import ThreadPoolExecutor

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError
from obstore.store import from_url

from tests.helpers.s3 import open_store


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
