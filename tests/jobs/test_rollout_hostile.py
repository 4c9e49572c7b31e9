"""Roll-outs over replicas that answer nonsense: it costs that replica, never the roll-out."""

import math
import time
from typing import Any

import pytest

from jobs import rollout
from jobs.base.config import load
from jobs.reconciling.evidence import answer_of
from serving.replica_client import Failed, ReplicaClient, Unreachable
from tests.helpers import fake_replica
from tests.helpers.fake_replica import TOKEN, FakeReplica, running
from tests.helpers.promotion import aliases

GOOD = {"": 0.6}
DRAFTER = {"version": "1", "sha256": "1" * 64, "compat": {}}


@pytest.fixture
def fake():
    one = FakeReplica("r0", "t", {})
    with running(one):
        yield one


@pytest.mark.parametrize(
    "said",
    [
        {"active": "2"},
        {"active": [1]},
        {"active": DRAFTER | {"sha256": 5}},
        {"active": DRAFTER | {"compat": "x"}},
        {"active": {}},
        {"state": None},
        {"target_id": 7},
        {"staged": "x"},
        {"staged": DRAFTER | {"version": []}},
    ],
    ids=str,
)
def test_a_status_of_wrong_types_is_a_fault(fake, said):
    whole = fake.status
    fake.status = lambda: whole() | said
    with ReplicaClient(fake.url, TOKEN) as client, pytest.raises(Failed, match="its status"):
        client.status()


@pytest.mark.parametrize(
    "said",
    [
        {"rows": None},
        {"rows": "abc"},
        {"rows": [1, None, "x"]},
        {"next": "x"},
        {"next": -1},
        {"requests": None},
        {"failed": math.nan},
        {"failed": "3"},
        {"started": {}},
        {"started": math.nan},
        {"lost": "many"},
    ],
    ids=str,
)
def test_a_feed_of_wrong_types_is_a_fault(fake, said):
    whole = fake.acceptance
    fake.acceptance = lambda after: whole(after) | said
    with ReplicaClient(fake.url, TOKEN) as client, pytest.raises(Failed, match="its acceptance"):
        client.acceptance(0)


def test_an_answer_without_end_or_without_bottom_is_a_fault(fake, monkeypatch):
    answer, body, pause = fake_replica._Handler._answer, b"", 0.0

    def sends(self, code: int, _: Any) -> None:
        self.send_response(code)
        self.end_headers()
        for at in range(0, len(body), 1 << 20):
            self.wfile.write(body[at : at + (1 << 20)])
        until = time.monotonic() + 3
        while pause and time.monotonic() < until:
            self.wfile.write(b" ")
            time.sleep(pause)
        self.close_connection = True

    monkeypatch.setattr(fake_replica._Handler, "_answer", sends)
    with ReplicaClient(fake.url, TOKEN, timeout=0.5) as client:
        body = b"[" * 200_000
        with pytest.raises(Failed, match="no JSON object"):
            client.status()
        body, pause = b"{", 0.1
        started = time.monotonic()
        with pytest.raises(Unreachable, match=r"within 0\.5 s"):
            client.status()
        assert time.monotonic() - started < 2
        monkeypatch.setattr("serving.replica_client.MOST_BYTES", 1 << 20)
        body, pause = b" " * (3 << 20), 0.0
        with pytest.raises(Failed, match="more than 1048576 bytes"):
            client.status()
    monkeypatch.setattr(fake_replica._Handler, "_answer", answer)


ODD = [
    {"accepted": [1, 1], "drafted": [3]},
    {"accepted": "123", "drafted": "333"},
    {"accepted": [math.nan], "drafted": [3]},
    {"accepted": [True], "drafted": [3]},
    {"accepted": [-5], "drafted": [3]},
    {"accepted": {"a": 1}, "drafted": [3]},
    {"finished_at": None},
    {"finished_at": math.nan},
    {"seconds": math.nan},
    {"seconds": "1"},
    {"seconds": -1.0},
    {"seconds": 1e308},
    {"output_tokens": ["x"]},
    {"first_token_seconds": "soon"},
    {"first_token_seconds": math.inf},
]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_odd_rows_are_none(odd):
    fake = FakeReplica("r0", "t", {})
    fake.finish_requests(1)
    row = fake.rows[0] | {"accepted": [1], "drafted": [3], "drafter_sha256": "1"}
    assert answer_of(row, []).rounds == 1
    with pytest.raises(ValueError, match="its counts"):
        answer_of(row | odd, [])


def test_odd_rows_are_left_out_of_a_roll_out(start_fleet, capsys):
    with start_fleet(GOOD, GOOD) as one:
        for fake in one.fakes:
            rows = fake.acceptance

            def acceptance(after, rows=rows):
                found = rows(after)
                mixed = [
                    r | ODD[i % len(ODD)] if i % 3 == 1 else r for i, r in enumerate(found["rows"])
                ]
                return found | {"rows": mixed}

            fake.acceptance = acceptance
        found = one.run()
        assert found["decision"] == "advanced", found
        assert one.loaded() == ["2", "2"]
        assert capsys.readouterr().err.count("rows of its feed are left out") < 20


def test_a_replica_that_talks_nonsense_is_held_and_told(start_fleet):
    with start_fleet(GOOD, GOOD, replicas=3) as one:
        whole = one.fakes[2].status
        one.fakes[2].status = lambda: whole() | {"active": "2"}
        found = one.run()
        assert found["decision"] == "held", found
        assert one.fakes[2].url in found["why"]
        assert one.loaded() == ["2", "2", "1"]
        rollout.plan(one.cfg)


def test_a_delivery_that_fails_is_no_fault_of_the_drafter(start_fleet):
    with start_fleet(GOOD, GOOD) as one:
        one.fakes[0].load = lambda version, sha: (500, {"error": "No space left on device"})
        found = one.run()
        assert found["decision"] == "held", found
        assert "No space left" in found["faults"][0]
        assert aliases(one.cfg)["champion"] == "2"
        del one.fakes[0].load
        assert one.run()["decision"] == "advanced"


def test_a_replica_has_no_password_in_its_url():
    with pytest.raises(ValueError, match="takes the token of") as told:
        load(None, ["rollout.replicas=[http://me:hidden@127.0.0.1:9]"])
    assert "127.0.0.1:9" in str(told.value)
    assert "hidden" not in str(told.value)


def test_a_name_that_no_host_can_have_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"rollout.dns = 'a\.\.b:80': "):
        rollout.run(load(None, [f"work={tmp_path}", "rollout.dns=a..b:80"]))


def test_a_folder_in_the_place_of_the_freeze_is_no_permission_to_go_on(start_fleet):
    with start_fleet(GOOD, GOOD) as one:
        one.cfg.path("freeze.json").mkdir()  # as a container mounts a file that is not there
        with pytest.raises(OSError, match="a folder is in the place of a file: remove it"):
            one.run()
        assert one.loaded() == ["1", "1"]
