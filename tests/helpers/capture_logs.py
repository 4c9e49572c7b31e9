"""Logs as the capture writes them, for tests of ingest."""

import json

from jobs.ingestion import log_tasks


def line(i, **changes):
    record = {
        "v": 1,
        "captured_at": f"2026-01-02T03:{i // 60 % 60:02}:{i % 60:02}Z",
        "request_id": f"r{i}",
        "prompt_ids": [1, i % 997],
        "output_ids": [4, i // 997, 6],
        "finish_reason": "stop",
        "conversation_id": f"c{i}",
        "domain": "ab"[i % 2],
    }
    return json.dumps(record | changes) + "\n"


def write_log(cfg, name, lines, mode="w"):
    folder = cfg.path("capture")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, mode) as stream:
        stream.writelines(lines)
    return folder / name


def samples(cfg) -> dict[str, int]:
    """{sample_id: how often it was served} of all rows of traffic/."""
    rows = cfg.table("traffic").read(["sample_id", "repeat_count"]).to_pylist()
    found: dict[str, int] = {}
    for row in rows:
        found[row["sample_id"]] = found.get(row["sample_id"], 0) + row["repeat_count"]
    return found


class SameProcess:
    """What ingest calls of Ray, run where a test can see inside."""

    @staticmethod
    def is_initialized():
        return True

    @staticmethod
    def remote(function):
        return type("Task", (), {"remote": staticmethod(function)})

    @staticmethod
    def get(values):
        return values


def in_this_process(monkeypatch):
    """The tasks of ingest run in this process, one after the other."""
    monkeypatch.setattr(log_tasks, "ray", SameProcess)
