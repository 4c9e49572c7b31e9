"""Which servers run at the same time, tested without a server: memory decides how many, and the
least recently used one stops first."""

import pytest
import torch

from jobs.base.config import load
from jobs.machine import resources
from jobs.servers import server_pool
from jobs.servers.server_pool import Room, Servers, at_once, require, room
from serving.server_memory import GIB, server_bytes
from tests.helpers.tiny import make_target


@pytest.fixture
def cfg(tmp_path):
    make_target(tmp_path / "target")
    return load(None, [f"work={tmp_path}", "target.dtype=float32"])


class Fake:
    """Stands for serving.vllm_server.Server and writes down what happens."""

    def __init__(self, k, events):
        self.k, self.events, self.url = k, events, f"url {k}"

    def start(self):
        self.events.append(("start", self.k))

    def stop(self):
        self.events.append(("stop", self.k))

    def wait_until_ready(self):
        pass

    def __exit__(self, *exc):
        self.stop()


@pytest.fixture
def events(monkeypatch):
    found = []
    monkeypatch.setattr(server_pool, "server", lambda cfg, log: Fake(tuple(cfg.serve.k), found))
    return found


def test_with_room_for_all_every_server_starts_once(cfg, events, tmp_path):
    with Servers(cfg, tmp_path, 3) as running:
        running.start([(), (3,), (7,)])
        for k in ((), (3,), (7,), ()):
            assert running.get(k).k == k
        running.keep([(), (7,)])
        running.start([(5,)])
        assert running.get((5,)).url == "url (5,)"
    starts = [k for what, k in events if what == "start"]
    assert starts == [(), (3,), (7,), (5,)]
    assert events[3] == ("stop", (3,))
    assert {k for what, k in events if what == "stop"} == set(starts)


def test_with_room_for_one_they_run_one_after_the_other(cfg, events, tmp_path):
    with Servers(cfg, tmp_path, 1) as running:
        running.start([(), (3,), (7,)])
        for k in ((), (), (3,), (7,), (7,), ()):
            running.get(k)
    up, most = set(), 0
    for what, k in events:
        (up.add if what == "start" else up.discard)(k)
        most = max(most, len(up))
    assert most == 1
    assert [k for what, k in events if what == "start"] == [(), (3,), (7,), ()]


def test_a_failed_measurement_stops_what_runs(cfg, events, tmp_path):
    def measure():
        with Servers(cfg, tmp_path, 2) as running:
            running.start([(), (3,)])
            raise ValueError("no round")

    with pytest.raises(ValueError, match="no round"):
        measure()
    assert {k for what, k in events if what == "stop"} == {(), (3,)}


def test_room_is_counted_from_free_memory(cfg, monkeypatch):
    each = server_bytes([cfg.target_path], 4, cfg.serve.kv_cache_gib)
    for count in (0, 1, 3):
        monkeypatch.setattr(server_pool, "free_bytes", lambda count=count: count * each + GIB // 2)
        assert room(cfg, None).servers == count
    assert "3.0 GiB (KV cache 2 GiB: serve.kv_cache_gib), 9.5 GiB are free" in room(cfg, None).words


def test_too_little_for_the_servers_that_are_needed_is_refused_with_numbers(cfg, monkeypatch):
    monkeypatch.setattr(server_pool, "free_bytes", lambda: 4 * GIB)
    assert require(cfg, None, 1, "verify").servers == 1
    with pytest.raises(ValueError, match=r"methods needs 2 .* room for 1: .*4\.0 GiB are free"):
        require(cfg, None, 2, "methods")


def test_a_gpu_is_shared_by_the_fraction_that_each_server_takes(cfg, monkeypatch):
    monkeypatch.setattr(server_pool, "vllm_runs_on_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (140 * GIB, 141 * GIB))
    assert room(cfg, None).servers == 1
    third = cfg.override("serve", args=["--gpu-memory-utilization", "0.3"])
    assert room(third, None).servers == 3
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 * GIB, 141 * GIB))
    with pytest.raises(ValueError, match="14% of it is free"):
        require(cfg, None, 1, "verify")


@pytest.mark.parametrize(
    ("count", "status", "words"),
    [
        (0, "fail", "no vLLM server fits"),
        (1, "warn", "one after the other"),
        (2, "warn", "2 at a time"),
        (3, "ok", "3 servers side by side"),
    ],
)
def test_doctor_says_what_verify_will_do(cfg, monkeypatch, count, status, words):
    monkeypatch.setattr(
        server_pool, "room", lambda *args: Room(servers=count, words="each takes 3")
    )
    [check] = resources.memory(cfg)
    assert (check.name, check.status) == ("memory", status)
    assert words in check.found
    assert at_once(Room(servers=count, words=""), 3) in check.found


def test_doctor_without_a_target_looks_at_free_memory_alone(tmp_path):
    [check] = resources.memory(load(None, [f"work={tmp_path}"]))
    assert "GiB free" in check.found
