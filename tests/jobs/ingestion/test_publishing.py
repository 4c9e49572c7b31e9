"""From logs to tables: each record once, no byte longer than allowed, nothing lost for good."""

import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import store.log_to_traffic
import store.tables
from jobs import gc, ingest
from jobs.ingestion import publishing
from store.lease import Lease, Lost
from tests.helpers.capture_logs import in_this_process, line, samples, served, write_log
from tests.helpers.logs import pair


@pytest.fixture(autouse=True)
def here(monkeypatch):
    in_this_process(monkeypatch)


def raw(cfg) -> list[bytes]:
    return sorted(cfg.table("rejects").read(["raw"])["raw"].to_pylist())


def objects(cfg, name) -> set[str]:
    return {found.name for found in cfg.place(name).objects() if "/" not in found.name}


def is_tidy(cfg) -> bool:
    """Whether rejects/ has no byte that is not live, and no marker is left."""
    live = objects(cfg, "rejects") == set(cfg.table("rejects").shards())
    return live and not [*cfg.place("ingesting").objects()]


def test_rejects_of_a_grown_log_are_counted_once(anywhere):
    """The view `rejects` had them again for each earlier state of the log."""
    cfg = anywhere("ingest.max_reject_rate=1")

    def run(*lines, mode="a"):
        write_log(cfg, "a.jsonl", lines, mode)
        ingest.run(cfg)
        assert is_tidy(cfg)
        return raw(cfg)

    assert run(line(1), "}{\n") == run() == [b"}{\n"]
    assert run("]]\n", line(2)) == run() == [b"]]\n", b"}{\n"]
    assert set(samples(cfg).values()) == {1}
    assert len(run(line(3), mode="w")) == 2  # another log: that it was this one is not known
    assert len(cfg.table("logs").read()) == 2


def test_rejects_under_former_rules_are_counted_once(anywhere):
    write_log(anywhere(), "a.jsonl", [line(1), line(2, output_ids=[1, 2, 3, 4]), "}{\n"])
    for least in (2, 4, 2, 4, 4, 2):
        cfg = anywhere("ingest.max_reject_rate=1", f"ingest.min_output_tokens={least}")
        assert ingest.run(cfg)["samples"] == len(samples(cfg)) == (2 if least == 2 else 1)
        assert raw(cfg) == [b"}{\n"]
        assert is_tidy(cfg)
        assert len(cfg.table("logs").read()) == 1


def test_what_an_older_version_kept_without_consent_goes(anywhere, monkeypatch):
    cfg = anywhere("ingest.max_reject_rate=1")
    refused = pair(headers=[["X-Flywheel-Consent", "false"]]).decode()
    write_log(cfg, "a.jsonl", [line(1), "{'secret': 1, 'consent': False}\n", refused])
    with monkeypatch.context() as older:
        older.setattr("store.log_formats.may_refuse", lambda raw: False)
        older.setattr("store.log_formats.answers", lambda value: [])
        older.setattr(store.log_to_traffic, "READING", 1)
        older.setattr(publishing, "READING", 1)
        ingest.run(cfg)
        assert (len(raw(cfg)), len(samples(cfg))) == (1, 2)
    former = cfg.table("traffic").version()
    stop_after(monkeypatch, "traffic")  # deletion must come to its end, too
    with pytest.raises(KeyboardInterrupt):
        ingest.run(cfg)
    assert len(objects(cfg, "traffic")) == 2
    ingest.run(cfg)
    assert (len(raw(cfg)), len(samples(cfg))) == (0, 1)
    assert objects(cfg, "traffic") == set(cfg.table("traffic").shards())
    assert is_tidy(cfg)
    with pytest.raises(FileNotFoundError, match="a file of this version is gone"):
        cfg.table("traffic").read(version=former)


def test_what_an_older_version_kept_goes_from_before_a_compaction_too(anywhere, monkeypatch):
    cfg = anywhere("ingest.max_reject_rate=1")
    for log in range(20):
        write_log(cfg, f"{log}.jsonl", [line(log), f"{{'secret': {log}, 'consent': False}}\n"])
    with monkeypatch.context() as older:
        older.setattr("store.log_formats.may_refuse", lambda raw: False)
        older.setattr(store.log_to_traffic, "READING", 1)
        older.setattr(publishing, "READING", 1)
        ingest.run(cfg)
    former = cfg.table("rejects").version()
    assert len(raw(cfg)) == 20
    assert gc.run(cfg)["small"], "put together; the small ones stay for gc.days"
    ingest.run(cfg)
    assert (len(raw(cfg)), len(samples(cfg))) == (0, 20)
    for name in ("traffic", "rejects"):
        assert objects(cfg, name) == set(cfg.table(name).shards())
    with pytest.raises(FileNotFoundError, match="a file of this version is gone"):
        cfg.table("rejects").read(version=former)


def stop_after(monkeypatch, name):
    """The next commit to a table ends the process right after it."""
    commit = store.tables.Table.replace

    def stopped(table, *args):
        version = commit(table, *args)
        if table.place.name == name:
            monkeypatch.setattr(store.tables.Table, "replace", commit)
            raise KeyboardInterrupt
        return version

    monkeypatch.setattr(store.tables.Table, "replace", stopped)


@pytest.mark.parametrize("name", ["rejects", "traffic", "logs"])
def test_a_log_that_grows_after_an_interruption_counts_once(anywhere, monkeypatch, name):
    cfg = anywhere()
    write_log(cfg, "a.jsonl", [line(i) for i in range(40)] + ["}{\n"])
    stop_after(monkeypatch, name)
    with pytest.raises(KeyboardInterrupt):
        ingest.run(cfg)
    write_log(cfg, "a.jsonl", [line(i) for i in range(40, 60)], "a")
    ingest.run(cfg)
    assert (len(samples(cfg)), set(samples(cfg).values())) == (60, {1})
    assert len(cfg.table("logs").read()) == 1
    assert is_tidy(cfg)


def test_a_log_that_is_the_beginning_of_another_one_does_not_make_it_new(configure):
    """Rotation leaves an empty log, and a copy of a log may stay beside it."""
    cfg = configure()
    write_log(cfg, "a.jsonl", [line(i) for i in range(40)])
    ingest.run(cfg)
    write_log(cfg, "empty.jsonl", [])
    write_log(cfg, "grown.jsonl", [line(i) for i in range(50)])
    ingest.run(cfg)
    for _ in range(2):
        assert ingest.run(cfg)["published"] == 0
    assert ingest.run(cfg)["samples"] == 50


def test_a_refused_run_leaves_what_the_former_rules_need(configure):
    """Its rejects took the place of the former ones, so they have to come back."""
    cfg = configure()
    write_log(cfg, "a.jsonl", [*(line(i) for i in range(40)), "}{\n"])
    ingest.run(cfg)
    with pytest.raises(ValueError, match="nothing was published"):
        ingest.run(configure("ingest.max_reject_rate=0", "ingest.min_output_tokens=3"))
    assert len(cfg.table("rejects").shards()) == 1
    assert ingest.run(cfg)["samples"] == 40
    (kept,) = set(cfg.table("rejects").read(["log"])["log"].to_pylist())
    assert [kept] == cfg.table("logs").read(["log"])["log"].to_pylist()
    assert is_tidy(cfg)


@pytest.mark.parametrize("damage", ["gone", "cut"])
@pytest.mark.parametrize("name", ["traffic", "rejects"])
def test_a_lost_shard_is_made_again(anywhere, name, damage):
    cfg = anywhere()
    for log in range(3):
        lines = [line(i) for i in range(log * 30, log * 30 + 30)]
        write_log(cfg, f"{log}.jsonl", [*lines, f"{log}}}\n"])
    ingest.run(cfg)
    before = cfg.table(name).read()
    shard = next(iter(cfg.table(name).shards()))
    if damage == "cut":
        cfg.place(name).write(shard, b"PAR1")
    else:
        cfg.place(name).delete([shard])
    assert ingest.run(cfg)["reused"] == 2
    assert cfg.table(name).lost() == []
    assert cfg.table(name).read().equals(before)


def test_a_lost_shard_with_rows_of_several_logs_is_made_again(configure):
    """As a compaction makes them."""
    cfg = configure()
    for log in range(3):
        write_log(cfg, f"{log}.jsonl", [line(i) for i in range(log * 30, log * 30 + 30)])
    ingest.run(cfg)
    traffic = cfg.table("traffic")
    rows, before = traffic.read(), samples(cfg)
    old, merged = list(traffic.shards()), traffic.write(rows)
    traffic.change(lambda live: ([merged], old))
    assert ingest.run(cfg)["reused"] == 3
    cfg.place("traffic").delete([merged.name])
    (cfg.path("capture") / "1.jsonl").rename(cfg.path("1.jsonl"))
    assert ingest.run(cfg)["samples"] == 60
    (cfg.path("1.jsonl")).rename(cfg.path("capture") / "1.jsonl")
    assert ingest.run(cfg)["reused"] == 2
    assert samples(cfg) == before
    assert traffic.lost() == []


def test_logs_of_a_bucket(anywhere, s3_env, tmp_path):
    url = s3_env.url("logs")
    cfg = anywhere(f"ingest.logs={url}/")
    local = [write_log(cfg, f"{i}.jsonl", [line(i), line(i + 9), "}{\n"] * 20) for i in range(2)]
    bucket = publishing.Place(url)
    for path in local:
        bucket.write(path.name, path)
    rate = "ingest.max_reject_rate=1"
    summary = ingest.run(anywhere(f"ingest.logs={url}/", rate))
    assert (summary["logs"], summary["samples"], summary["reused"]) == (2, 4, 0)
    files = cfg.table("rejects").read(["file"])["file"].to_pylist()
    assert set(files) == {f"{url}/0.jsonl", f"{url}/1.jsonl"}
    assert ingest.run(anywhere(f"ingest.logs={url}/", rate))["published"] == 0
    bucket.write("0.jsonl", local[0].read_bytes() + line(99).encode())
    assert ingest.run(anywhere(f"ingest.logs={url}/", rate))["samples"] == 5
    assert len(cfg.table("logs").read()) == 2
    assert ingest.run(anywhere(rate))["reused"] == 1  # the same content, wherever it is
    assert not [*Path(os.environ.get("TMPDIR", "/tmp")).glob("flywheel-*")]


def test_no_commit_after_the_lease_was_lost(anywhere, monkeypatch):
    cfg = anywhere()
    write_log(cfg, "a.jsonl", [line(i) for i in range(9)])

    def lost(self):
        raise Lost("another host took over")

    monkeypatch.setattr(Lease, "check", lost)
    with pytest.raises(ValueError, match="another host took over"):
        ingest.run(cfg)
    assert all(cfg.table(name).version() in (None, 0) for name in ("traffic", "rejects", "logs"))


COMMAND = """
import json, os, signal, sys, time
import store.log_to_traffic as parsing
from jobs import ingest
from jobs.base.config import load
from jobs.ingestion import log_tasks
from tests.helpers.capture_logs import SameProcess
log_tasks.ray = SameProcess
parsing.SHARD_TOKENS = 500
for line in sys.stdin:
    child = os.fork()  # so that only the first one takes seconds to import
    if not child:
        try:
            os._exit(ingest.run(load(None, sys.argv[1:]))["published"])
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(99)
    end = time.monotonic() + float(line)
    while not (done := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.001)
    if not done[0]:
        os.kill(child, signal.SIGKILL)
        done = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(done[1]), flush=True)
"""


class Process:
    """A process that ingests whenever `run` says so."""

    def __init__(self, cfg):
        settings = [f"work={cfg.work}", f"scratch={cfg.scratch}", f"target.path={cfg.target.path}"]
        command = [sys.executable, "-c", COMMAND, *settings]
        self.process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)

    def start(self, seconds: float = 100.0) -> None:
        """SIGKILL ends it after so many seconds."""
        assert self.process.stdin
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()

    def result(self) -> int:
        """What became of it: the number of logs that it published; -SIGKILL; 99 for an error."""
        assert self.process.stdout
        return int(self.process.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.communicate()


def content(cfg) -> dict[str, list]:
    """Rows of every table; of logs/ without the time."""
    names = ("traffic", "acceptance", "rejects", "logs")
    found = {name: cfg.table(name).read().to_pylist() for name in names}
    for row in found["logs"]:
        row.pop("ingested_at")
    return {name: sorted(map(repr, rows)) for name, rows in found.items()}


def test_killed_at_any_point_and_run_again_equals_never_killed(anywhere, tmp_path):
    """SIGKILL an ingest at random moments while its logs grow; compare with a clean run."""
    cfg = anywhere()
    for log in range(4):
        lines = [served(i) for i in range(log * 300, log * 300 + 350)]
        write_log(cfg, f"{log}.jsonl", [*lines, "}{\n"])
    chance, ends = random.Random(1), []
    with Process(cfg) as process:
        for step in range(14):
            process.start(chance.uniform(0, 1.0))
            ends.append(process.result())
            for name in ("traffic", "acceptance", "rejects", "logs"):
                cfg.table(name).read()  # nothing is published half
            if step % 3 or ends[-1] >= 0:
                write_log(cfg, f"{step % 4}.jsonl", [served(5000 + step)], "a")
        process.start()
        assert process.result() in range(5)
        process.start()
        assert process.result() == 0
    assert -signal.SIGKILL in ends
    assert 99 not in ends
    # A kill between a shard and its marker leaves a file that no later run knows: gc does.
    gc.run(cfg.override("gc", days=0))
    assert is_tidy(cfg)
    clean = replace(cfg, work=str(tmp_path / "clean"))
    with Process(clean) as process:
        process.start()
        assert process.result() == 4
    assert content(cfg) == content(clean)


def test_two_at_once_publish_every_log_once(anywhere):
    cfg = anywhere()
    for log in range(4):
        write_log(cfg, f"{log}.jsonl", [line(i) for i in range(log * 500, log * 500 + 500)])
    with Process(cfg) as one, Process(cfg) as other:
        one.start()
        other.start()
        assert {one.result(), other.result()} == {0, 4}
    assert (len(samples(cfg)), set(samples(cfg).values())) == (2000, {1})
    assert cfg.table("traffic").version() == 1
    assert is_tidy(cfg)
