"""Ingest over real logs, real Ray and real Parquet: complete, incremental, interruptible."""

import gzip
import json
import subprocess
import sys

import pytest

import store.digests
import store.log_to_traffic
import store.shards
from dflash.identity import legacy_target_id
from jobs import ingest
from jobs.ingestion import log_tasks
from jobs.ingestion.rules import make_rules
from store.digests import digest_log
from store.files import sweep
from store.log_files import find_logs
from store.log_to_traffic import ingest_log, publish
from store.schemas import REJECTS
from store.shards import read_dataset, read_manifests
from store.traffic_table import read_traffic
from tests.helpers.capture_logs import line, write_log
from tests.helpers.shards import verify

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
    table = read_traffic(cfg.path("traffic"), summary["target_id"])
    assert table.num_rows == 100
    assert set(table["split"].to_pylist()) == {"train", "val", "test"}
    rejects = read_dataset(cfg.path("rejects"), REJECTS).to_pylist()
    assert [r["reason"] for r in rejects] == ["not_json"]
    data = cfg.path("capture", "a.jsonl").read_bytes()
    assert all(data[r["offset"] :].startswith(r["raw"]) for r in rejects)
    assert b"c105" not in b"".join(p.read_bytes() for p in cfg.path("rejects").glob("*.parquet"))


def test_split_is_by_conversation_and_does_not_move(configure):
    cfg = configure()
    turns = [line(i, conversation_id=f"c{i % 20}") for i in range(200)]
    write_log(cfg, "a.jsonl", turns)
    ingest.run(cfg)
    rows = read_traffic(cfg.path("traffic")).to_pylist()
    splits = {(r["conversation_id"], r["split"]) for r in rows}
    assert len(splits) == 20
    write_log(cfg, "b.jsonl", [line(i + 500) for i in range(100)])
    ingest.run(cfg)
    after = {
        (r["conversation_id"], r["split"]) for r in read_traffic(cfg.path("traffic")).to_pylist()
    }
    assert splits <= after


def test_second_run_reads_only_what_is_new(configure):
    cfg = configure()
    write_log(cfg, "a.jsonl", [line(i) for i in range(50)])
    first = ingest.run(cfg)
    before = {p: p.stat().st_mtime_ns for p in cfg.path("traffic").rglob("*") if p.is_file()}
    again = ingest.run(cfg)
    assert (again["reused"], again["published"], again["samples"]) == (1, 0, 50)
    assert first["domains"] == again["domains"]
    write_log(cfg, "b.jsonl", [line(i) for i in range(40, 70)])
    third = ingest.run(cfg)
    assert (third["reused"], third["published"], third["samples"]) == (1, 1, 70)
    assert all(p.stat().st_mtime_ns == t for p, t in before.items())
    repeats = read_traffic(cfg.path("traffic"))["repeat_count"].to_pylist()
    assert sorted(repeats) == [1] * 60 + [2] * 10


def test_a_grown_log_replaces_its_older_state(configure):
    cfg = configure()
    half = line(9)[:30]
    write_log(cfg, "a.jsonl", [*(line(i) for i in range(40)), half])
    assert ingest.run(cfg)["rejected"] == {"cut_line": 1}
    write_log(cfg, "a.jsonl", [line(9)[30:], *(line(i) for i in range(40, 60))], "a")
    summary = ingest.run(cfg)
    assert summary["rejected"] == {}
    assert summary["samples"] == 60
    assert len(read_manifests(cfg.path("traffic"))) == 1
    repeats = read_traffic(cfg.path("traffic"))["repeat_count"].to_pylist()
    assert sorted(repeats) == [1] * 59 + [2]  # line 9 was served twice


def test_a_rotated_log_is_not_counted_twice(configure):
    cfg = configure()
    path = write_log(cfg, "a.jsonl", [line(i) for i in range(10)])
    ingest.run(cfg)
    path.rename(path.with_name("a.1.jsonl"))
    write_log(cfg, "a.jsonl", [line(i) for i in range(10, 20)])
    assert ingest.run(cfg)["samples"] == 20
    assert set(read_traffic(cfg.path("traffic"))["repeat_count"].to_pylist()) == {1}


def test_two_logs_with_the_same_content_count_once(configure):
    cfg = configure()
    for name in ("a.jsonl", "b.jsonl"):
        write_log(cfg, name, [line(i) for i in range(10)])
    summary = ingest.run(cfg)
    assert (summary["logs"], summary["same_content"], summary["accepted"]) == (2, 1, 10)
    assert set(read_traffic(cfg.path("traffic"))["repeat_count"].to_pylist()) == {1}


def test_repeats_within_a_log_are_counted(configure):
    cfg = configure()
    write_log(cfg, "a.jsonl", [line(1), line(2), line(1), line(1)])
    summary = ingest.run(cfg)
    assert (summary["accepted"], summary["samples"]) == (4, 2)
    assert sorted(read_traffic(cfg.path("traffic"))["repeat_count"].to_pylist()) == [1, 3]


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
    assert find_logs([folder, str(path), f"{folder}/*.jsonl"]) == ([path], {})


def test_several_shards_per_log(configure, monkeypatch, tmp_path):
    cfg = configure()
    log = write_log(cfg, "a.jsonl", [line(i) for i in range(100)])
    monkeypatch.setattr(store.log_to_traffic, "SHARD_TOKENS", 100)
    rules = make_rules(cfg)
    size, sha256, prefixes = digest_log(log, set())
    arguments = (log, size, sha256, rules, cfg.path("traffic"), cfg.path("rejects"))
    result = ingest_log(*arguments)
    assert len(result["shards"]) == 5
    assert ingest_log(*arguments) == result | {"reused": True}
    publish(cfg.path("traffic"), log, result, prefixes)
    assert read_traffic(cfg.path("traffic")).num_rows == 100


def test_bytes_of_rejects_are_bounded_for_each_log(configure, monkeypatch):
    monkeypatch.setattr(store.log_to_traffic, "MAX_REJECTS_BYTES", 1000)
    cfg = configure()
    log = write_log(cfg, "a.jsonl", ["x" * 99 + "\n"] * 50)
    size, sha256, _ = digest_log(log, set())
    rules = make_rules(cfg)
    ingest_log(log, size, sha256, rules, cfg.path("traffic"), cfg.path("rejects"))
    rejects = store.shards.read_dataset(cfg.path("rejects"), REJECTS).to_pylist()
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
    assert set(read_traffic(cfg.path("traffic"))["repeat_count"].to_pylist()) == {1}


def test_an_unchanged_log_is_not_read_again(configure, monkeypatch):
    """Every run once hashed all bytes of all logs and shards."""
    cfg = configure()
    logs = [write_log(cfg, f"{i}.jsonl", [line(i) for i in range(i, 50)]) for i in range(3)]
    monkeypatch.setattr(store.digests, "SETTLED", 0)
    ingest.run(cfg)
    read = []
    run = log_tasks.each
    monkeypatch.setattr(log_tasks, "each", lambda f, jobs: read.append((f, jobs)) or run(f, jobs))
    monkeypatch.setattr(store.shards, "file_sha256", None)
    assert (ingest.run(cfg)["reused"], read[0]) == (3, (digest_log, []))
    write_log(cfg, "0.jsonl", [line(60)], "a")
    assert ingest.run(cfg)["samples"] == 51
    assert [job[0] for job in read[2][1]] == logs[:1]


def test_records_under_the_former_identity_of_the_target_stay(configure, target):
    cfg = configure()
    former = legacy_target_id(target)
    write_log(
        cfg, "a.jsonl", [line(i, target_id=former, model=f"alias-{i % 2}") for i in range(10)]
    )
    summary = ingest.run(cfg)
    assert summary["target_id"] != former
    assert (summary["samples"], summary["not_used"]) == (10, {})


def test_labels_of_any_text_do_not_stop_ingest(configure, capsys):
    cfg = configure()
    odd = ["[/v1/help]", "[beta] billing", "$\\foo$", "a\u0000b"]
    write_log(cfg, "a.jsonl", [line(i, domain=odd[i % 4], model="[/m]") for i in range(16)])
    write_log(cfg, "[x] [b].txt", ["hello"])
    assert set(ingest.run(cfg)["domains"]) == {*odd[:3], "a\ufffdb"}
    assert "[x] [b].txt" in " ".join(capsys.readouterr().err.split())  # long lines are folded


LOOP = """
import sys
from pathlib import Path
from store import log_to_traffic as ingest
from store.digests import digest_log
from store.log_formats import Rules
ingest.SHARD_TOKENS = 500
log, work = Path(sys.argv[1]), Path(sys.argv[2])
rules = Rules("t", 1000, "default", 2, 10, 10)
size, sha256, prefixes = digest_log(log, set())
print("go", flush=True)
result = ingest.ingest_log(log, size, sha256, rules, work / "traffic", work / "rejects")
ingest.publish(work / "traffic", log, result, prefixes)
"""


def test_killed_at_any_point_and_run_again_equals_never_killed(tmp_path):
    """SIGKILL an ingest again and again until one run gets through; compare with a clean run."""
    log = tmp_path / "a.jsonl"
    log.write_text("".join(line(i) for i in range(3000)))
    kills = 0
    for delay in [0.0, 0.02, 0.05, 0.09, 0.2, 60.0]:
        command = [sys.executable, "-c", LOOP, str(log), str(tmp_path / "killed")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                process.wait(delay)
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
                process.wait()
                assert verify(tmp_path / "killed" / "traffic") == 0  # nothing is published half
    assert kills
    command = [sys.executable, "-c", LOOP, str(log), str(tmp_path / "clean")]
    subprocess.run(command, check=True, timeout=60)

    def shards(name) -> dict[str, bytes]:
        folder = tmp_path / name / "traffic"
        return {p.name: p.read_bytes() for p in folder.glob("[!.]*.parquet")}

    assert shards("killed") == shards("clean")
    assert len(shards("clean")) > 20
    assert read_traffic(tmp_path / "killed" / "traffic").num_rows == 3000
    sweep(tmp_path / "killed" / "traffic")
    assert not list(tmp_path.rglob("*.tmp"))
