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


DRAFTER = "0123456789ab" * 5 + "cdef"


def served(i, **changes):
    """A line that says what the drafter's rounds were: 4 tokens in 1 to 3 rounds."""
    rounds = {
        "output_ids": [4, i // 997, 6, 7],
        "accepted": [i % 3, *[0] * (2 - i % 3)],
        "drafted": [7, *[3] * (2 - i % 3)],
        "drafter": "7",
        "drafter_sha256": DRAFTER,
        "replica": "east" if i % 2 else "west",
        "k": 7,
        "started_at": 1764547200 + 60 * i,
        "finished_at": 1764547201 + 60 * i,
        "concurrency": 1 + i,
    }
    return line(i, **rounds | changes)


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
