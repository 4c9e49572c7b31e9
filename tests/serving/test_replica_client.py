"""One replica over HTTP: what comes of each fault, and that the token is never told."""

import pytest

from dflash.checkpoint import drafter_sha256, save_drafter
from dflash.model import Drafter
from serving.replica_client import (
    Denied,
    Failed,
    NeedsRestart,
    Refused,
    ReplicaClient,
    ReplicaFault,
    Unreachable,
    find_token,
)
from tests.helpers.fake_replica import TOKEN, FakeReplica, running
from tests.helpers.promotion import SHAPE


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    import torch

    folder = tmp_path_factory.mktemp("drafter") / "one"
    save_drafter(Drafter(SHAPE), folder, torch.float32)
    return folder


@pytest.fixture
def fake(drafter):
    one = FakeReplica("r0", "t", {drafter_sha256(drafter): {"": 0.5}})
    with running(one):
        yield one


def test_a_drafter_is_delivered_loaded_and_activated(fake, drafter):
    sha = drafter_sha256(drafter)
    with ReplicaClient(fake.url, TOKEN) as client:
        assert client.status()["active"] is None
        assert client.deliver(drafter, "7", sha, "t")["sha256"] == sha
        assert client.activate(sha)["active"]["version"] == "7"
        assert client.status()["active"]["sha256"] == sha
        assert client.acceptance(0)["rows"][-1]["drafter_sha256"] == sha
        client.activate("")
        assert client.status()["active"] is None


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("restart", NeedsRestart),
        ("refuse", Refused),
        ("verify", Failed),
        ("die-load", Unreachable),
        ("hang-activate", Unreachable),
    ],
)
def test_each_fault_has_its_error_and_names_the_replica(fake, drafter, fault, error):
    fake.faults.add(fault)
    sha = drafter_sha256(drafter)
    with ReplicaClient(fake.url, TOKEN, timeout=0.4) as client:

        def swap():
            client.deliver(drafter, "7", sha, "t")
            client.activate(sha)

        with pytest.raises(error, match=fake.url) as raised:
            swap()
        assert TOKEN not in str(raised.value)


def test_a_wrong_token_and_a_dead_replica_are_told_apart(fake):
    with ReplicaClient(fake.url, "wrong-token-here") as client:
        with pytest.raises(Denied, match="401") as raised:
            client.status()
        assert "wrong-token-here" not in str(raised.value)
    with ReplicaClient("http://127.0.0.1:9", TOKEN) as client, pytest.raises(Unreachable):
        client.status()
    assert issubclass(Denied, ReplicaFault)


def test_the_token_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYWHEEL_TOKEN", "of-the-environment")
    assert find_token() == "of-the-environment"
    file = tmp_path / "token"
    file.write_text("of-the-file-itself\n")
    assert find_token(file) == "of-the-file-itself"
    file.write_text("two words")
    with pytest.raises(ValueError, match="holds no token") as raised:
        find_token(file)
    assert "two words" not in str(raised.value)
