"""Ingest over real logs, real Ray and real Parquet: complete, incremental, interruptible."""

import gzip
import json
import shutil
from collections import Counter

import duckdb
import pytest

import store.digests
import store.log_to_traffic
import store.tables
from dflash.identity import legacy_target_id, target_id
from jobs import ingest
from jobs.ingestion import log_tasks
from jobs.ingestion.rules import make_rules
from jobs.regeneration import kept_tokenizers
from store.digests import digest_log
from store.log_files import find_logs
from store.log_states import SHARDED
from store.log_to_traffic import ingest_log
from store.place import place_of
from tests.helpers.capture_logs import in_this_process, line, samples, write_log

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_rows_are_inputs_minus_rejects(configure):
    cfg = configure()
    bad = [line(1)[:40] + "\n", line(2, output_ids=[3]), line(3, finish_reason="error")]
    write_log(cfg, "a.jsonl", [line(i) for i in range(100)] + bad)
    write_log(cfg, "b.jsonl", [line(i, consent=False) for i in range(100, 110)])
    summary = ingest.run(cfg)
    assert json.loads(json.dumps(summary)) == summary
    assert summary["records"] == 113
    assert summary["accepted"] == summary["samples"] == 100
    assert summary["rejected"] == {"not_json": 1}
    assert summary["not_used"] == {"no_consent": 10, "short_output": 1, "finish_error": 1}
    table = cfg.table("traffic").read()
    assert table.num_rows == 100
    assert set(table["split"].to_pylist()) == {"train", "val", "test"}
    rejects = cfg.table("rejects").read().to_pylist()
    assert [r["reason"] for r in rejects] == ["not_json"]
    data = cfg.path("capture", "a.jsonl").read_bytes()
    assert all(data[r["offset"] :].startswith(r["raw"]) for r in rejects)
    assert b"c105" not in b"".join(p.read_bytes() for p in cfg.path("rejects").glob("*.parquet"))


def test_split_is_by_conversation_and_does_not_move(configure):
    cfg = configure()
    turns = [line(i, conversation_id=f"c{i % 20}") for i in range(200)]
    write_log(cfg, "a.jsonl", turns)
    ingest.run(cfg)

    def sides():
        rows = cfg.table("traffic").read(["conversation_id", "split"]).to_pylist()
        return {(r["conversation_id"], r["split"]) for r in rows}

    splits = sides()
    assert len(splits) == 20
    write_log(cfg, "b.jsonl", [line(i + 500) for i in range(100)])
    ingest.run(cfg)
    assert splits <= sides()


def test_second_run_reads_only_what_is_new(configure):
    cfg = configure()
    write_log(cfg, "a.jsonl", [line(i) for i in range(50)])
    first = ingest.run(cfg)
    before = {p: p.stat().st_mtime_ns for p in cfg.path("traffic").rglob("*.*") if p.is_file()}
    again = ingest.run(cfg)
    assert (again["reused"], again["published"], again["samples"]) == (1, 0, 50)
    assert first["domains"] == again["domains"]
    write_log(cfg, "b.jsonl", [line(i) for i in range(40, 70)])
    third = ingest.run(cfg)
    assert (third["reused"], third["published"], third["samples"]) == (1, 1, 70)
    assert all(p.stat().st_mtime_ns == t for p, t in before.items())
    assert sorted(samples(cfg).values()) == [1] * 60 + [2] * 10


def test_a_grown_log_replaces_its_older_state(configure):
    cfg = configure()
    half = line(9)[:30]
    write_log(cfg, "a.jsonl", [*(line(i) for i in range(40)), half])
    assert ingest.run(cfg)["rejected"] == {"cut_line": 1}
    write_log(cfg, "a.jsonl", [line(9)[30:], *(line(i) for i in range(40, 60))], "a")
    summary = ingest.run(cfg)
    assert summary["rejected"] == {}
    assert summary["samples"] == 60
    assert len(cfg.table("traffic").shards()) == len(cfg.table("logs").read()) == 1
    assert sorted(samples(cfg).values()) == [1] * 59 + [2]  # line 9 was served twice


def test_a_rotated_log_is_not_counted_twice(configure):
    cfg = configure()
    path = write_log(cfg, "a.jsonl", [line(i) for i in range(10)])
    ingest.run(cfg)
    path.rename(path.with_name("a.1.jsonl"))
    write_log(cfg, "a.jsonl", [line(i) for i in range(10, 20)])
    assert ingest.run(cfg)["samples"] == 20
    assert set(samples(cfg).values()) == {1}


def test_two_logs_with_the_same_content_count_once(configure):
    cfg = configure()
    for name in ("a.jsonl", "b.jsonl"):
        write_log(cfg, name, [line(i) for i in range(10)])
    summary = ingest.run(cfg)
    assert (summary["logs"], summary["same_content"], summary["accepted"]) == (2, 1, 10)
    assert set(samples(cfg).values()) == {1}


def test_repeats_within_a_log_are_counted(configure):
    cfg = configure()
    write_log(cfg, "a.jsonl", [line(1), line(2), line(1), line(1)])
    summary = ingest.run(cfg)
    assert (summary["accepted"], summary["samples"]) == (4, 2)
    assert sorted(samples(cfg).values()) == [1, 3]


def test_other_rules_replace_and_former_rules_come_back(configure):
    cfg, strict = configure(), configure("ingest.min_output_tokens=4")
    write_log(cfg, "a.jsonl", [line(i) for i in range(10)] + [line(11, output_ids=[1, 2, 3, 4])])
    assert ingest.run(cfg)["samples"] == 11
    assert ingest.run(strict)["samples"] == 1
    assert ingest.run(cfg)["samples"] == 11
    assert ingest.run(strict)["samples"] == 1
    assert ingest.run(strict)["published"] == 0


@pytest.mark.parametrize("path", ["nowhere", "nowhere/*.jsonl", "."])
def test_wrong_path_is_one_message(configure, tmp_path, path):
    with pytest.raises(ValueError, match=r"ingest\.logs: no .*ingest\.logs=PATH"):
        ingest.run(configure(f"ingest.logs={tmp_path / path}"))


def test_missing_target_is_one_message(configure, target):
    cfg = configure()
    write_log(cfg, "a.jsonl", [line(1)])
    (target / "config.json").unlink()
    with pytest.raises((ValueError, OSError), match=r"config\.json"):
        ingest.run(cfg)


def test_folders_globs_and_files_name_each_log_once(configure, tmp_path):
    cfg = configure()
    path = write_log(cfg, "a.jsonl", [line(1)])
    write_log(cfg, ".hidden.jsonl", [line(2)])
    folder = str(path.parent)
    logs, aside = find_logs([folder, str(path), f"{folder}/*.jsonl"])
    assert ([*logs], aside) == ([str(path)], {})


def parse(cfg, log):
    size, sha256, _ = digest_log(str(log), set())
    traffic, rejects, acceptance, texts = (cfg.table(name) for name in SHARDED)
    places = traffic, rejects, acceptance, texts, cfg.place("ingesting")
    return ingest_log(str(log), size, sha256, make_rules(cfg), *places)


def test_a_log_in_a_bucket_is_read_below_scratch(configure, bucket, monkeypatch):
    cfg = configure(f"ingest.logs={bucket}/logs/")
    log = write_log(cfg, "a.jsonl", [line(i) for i in range(30)])
    place_of(bucket).write("logs/a.jsonl", log)
    in_this_process(monkeypatch)
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    assert ingest.run(cfg)["samples"] == 30
    assert list(cfg.path("logs_read").iterdir()) == []


def test_several_shards_per_log(configure, monkeypatch, tmp_path):
    cfg = configure()
    log = write_log(cfg, "a.jsonl", [line(i) for i in range(100)])
    monkeypatch.setattr(store.log_to_traffic, "SHARD_TOKENS", 100)
    state = parse(cfg, log)
    assert [shard.rows for shard in state.traffic or []] == [20] * 5
    assert parse(cfg, log) == state
    assert len(samples(cfg)) == 0
    assert (ingest.run(cfg)["reused"], len(samples(cfg))) == (1, 100)


def test_bytes_of_rejects_are_bounded_for_each_log(configure, monkeypatch):
    monkeypatch.setattr(store.log_to_traffic, "MAX_REJECTS_BYTES", 1000)
    cfg = configure("ingest.max_reject_rate=1")
    log = write_log(cfg, "a.jsonl", ["x" * 99 + "\n"] * 50)
    parse(cfg, log)
    with pytest.raises(ValueError, match="none of the 50 records"):
        ingest.run(cfg)
    rejects = cfg.table("rejects").read().to_pylist()
    assert [len(r["raw"]) for r in rejects] == [100] * 10 + [0] * 40
    assert [r["offset"] for r in rejects] == [*range(0, 5000, 100)]


def test_rotated_and_compressed_logs_are_read_and_counted_once(configure, capsys):
    """Rotated logs of a folder were once missed, and a .gz found by a glob was read as text."""
    cfg = configure()
    path = write_log(cfg, "capture.jsonl", [line(i) for i in range(8)])
    write_log(cfg, "capture.jsonl.1", [line(i) for i in range(8, 12)])
    old = cfg.path("capture", "capture.jsonl-20261129.gz")
    old.write_bytes(gzip.compress("".join(line(i) for i in range(12, 16)).encode()))
    write_log(cfg, "notes.txt", ["hello"])
    summary = ingest.run(cfg)
    assert (summary["logs"], summary["samples"], summary["left_aside"]) == (3, 16, 1)
    assert "notes.txt" in capsys.readouterr().err
    packed = path.with_name("capture.jsonl.2.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    again = ingest.run(configure(f"ingest.logs={cfg.path('capture')}/capture*"))
    assert (again["reused"], again["published"], again["samples"]) == (3, 0, 16)
    assert set(samples(cfg).values()) == {1}


def test_an_unchanged_log_is_not_read_again(configure, monkeypatch):
    """Every run once hashed all bytes of all logs and shards."""
    cfg = configure()
    logs = [write_log(cfg, f"{i}.jsonl", [line(i) for i in range(i, 50)]) for i in range(3)]
    monkeypatch.setattr(store.digests, "SETTLED", 0)
    first = ingest.run(cfg)
    files = {p: p.stat().st_mtime_ns for p in cfg.path().rglob("*") if p.is_file()}
    with monkeypatch.context() as idle:
        idle.setattr(log_tasks, "ray", None)  # no task runs, and Ray is not started
        idle.setattr(store.tables, "write_shard", None)
        idle.setattr(duckdb, "connect", None)
        again = ingest.run(cfg)
    assert again == first | {"reused": 3, "published": 0}
    after = {p: p.stat().st_mtime_ns for p in cfg.path().rglob("*") if p.is_file()}
    changed = {p for p in files.keys() | after.keys() if files.get(p) != after.get(p)}
    assert {p.parent.name for p in changed} == {"ingest"}, "only the lease"
    read = []
    parse = store.log_to_traffic.ingest_log
    monkeypatch.setattr(log_tasks, "ingest_log", lambda *a: read.append(a[0]) or parse(*a))
    in_this_process(monkeypatch)
    write_log(cfg, "0.jsonl", [line(60)], "a")
    assert ingest.run(cfg)["samples"] == 51
    assert read == [str(logs[0])]


def test_records_under_the_former_identity_of_the_target_stay(configure, target):
    cfg = configure()
    former = legacy_target_id(target)
    write_log(
        cfg, "a.jsonl", [line(i, target_id=former, model=f"alias-{i % 2}") for i in range(10)]
    )
    summary = ingest.run(cfg)
    assert summary["target_id"] != former
    assert (summary["samples"], summary["not_used"]) == (10, {})


def test_samples_of_a_former_target_stay(configure, target, tmp_path):
    """`flywheel regenerate` needs them, and their logs may stand beside the new ones for long."""
    cfg, copy = configure(), shutil.copytree(target, tmp_path / "other")
    write_log(cfg, "a.jsonl", [line(i) for i in range(10)] + ["{\n"])
    first = ingest.run(cfg)["target_id"]
    assert kept_tokenizers.kept(cfg, first) is not None
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"of": "another revision"}))
    later = configure(f"target.path={copy}")
    own = [line(i, target_id=target_id(copy)) for i in range(20, 24)]
    write_log(cfg, "b.jsonl", own)
    write_log(cfg, "a.jsonl", [line(i, target_id=first) for i in range(10)] + ["{\n"])
    for _ in range(2):
        summary = ingest.run(later)
        assert (summary["samples"], summary["not_used"]) == (4, {"other_target": 10})
        rows = cfg.table("traffic").read(["target_id"])["target_id"].to_pylist()
        assert Counter(rows) == {first: 10, summary["target_id"]: 4}
    assert summary["published"] == 0


def test_labels_of_any_text_do_not_stop_ingest(configure, capsys):
    cfg = configure()
    odd = ["[/v1/help]", "[beta] billing", "$\\foo$", "a\u0000b"]
    write_log(cfg, "a.jsonl", [line(i, domain=odd[i % 4], model="[/m]") for i in range(16)])
    write_log(cfg, "[x] [b].txt", ["hello"])
    assert set(ingest.run(cfg)["domains"]) == {*odd[:3], "a\ufffdb"}
    assert "[x] [b].txt" in " ".join(capsys.readouterr().err.split())  # long lines are folded
