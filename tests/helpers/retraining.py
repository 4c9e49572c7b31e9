"""Traffic of a work folder without any log, and stages that only note that they ran."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dflash.identity import target_id
from jobs.base.config import Config
from pipelines import retrain
from store import windows
from store.windows import Window
from tests.helpers.tables import add_rows

GATE = """
tau: {min: 1.0}
gain: {min: -9.0}
domains: {max_loss: 0.98, visible: 1.0}
leaking: {max_share: 1.0}
speed: {required: false}
"""
"""A gate that lets drafters of tiny runs pass."""
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def add_traffic(
    cfg: Config,
    names: range,
    domain: str = "a",
    log: str = "log",
    tokens: int = 100,
    at: datetime = NOON,
    **more: Any,
) -> None:
    """Samples s<i> of this target, as ingest publishes them, and the state of their log."""
    shared = {"target_id": target_id(cfg.target_path), "log": log, "domain": domain}
    rows = [
        shared
        | {
            "sample_id": f"s{i}",
            "captured_at": at + timedelta(seconds=i),
            "request_id": f"r{i}",
            "output_tokens": tokens,
            "prompt_tokens": 5,
            "repeat_count": 1,
        }
        | more
        for i in names
    ]
    add_rows(cfg, "traffic", rows)
    if log not in cfg.table("logs").read(["log"])["log"].to_pylist():
        add_rows(cfg, "logs", [{"log": log, "ingested_at": at, "target_id": shared["target_id"]}])


class Stages:
    """Stages in the place of the real ones. `fail`: names that raise; `answers`: other summaries;
    `seen`: the settings that each ran with.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.fail: set[str] = set()
        self.answers: dict[str, dict[str, Any]] = {}
        self.seen: dict[str, Config] = {}
        self.during: dict[str, Any] = {}
        for part in ("LEARN", "DELIVER"):
            names = [name for name, _ in getattr(retrain, part)]
            patch.setattr(retrain, part, [(name, self._stage(name)) for name in names])
        for name in ("ingest", "regenerate"):
            patch.setattr(getattr(retrain, name), "run", self._stage(name))
        patch.setattr(retrain.rollout, "run", self._stage("rollout"))

    def _stage(self, name: str):
        def run(cfg: Config) -> dict[str, Any]:
            self.calls.append(name)
            self.seen[name] = cfg
            if name in self.during:
                self.during[name]()
            if name in self.fail:
                raise ValueError(f"{name} broke: mend it")
            return SUMMARIES[name] | self.answers.get(name, {})

        return run

    def take(self) -> list[str]:
        """The names since the last time."""
        found, self.calls = self.calls, []
        return found


_TAU = {"pooled": 2.5, "ci": [2.4, 2.6]}
SUMMARIES: dict[str, dict[str, Any]] = {
    "ingest": {"logs": 1, "samples": 1},
    "regenerate": {"prompts": 3, "answers": 2, "left_out": {"no_chat": 1}},
    "select": {"version": 7, "samples": 10, "tokens": 1000},
    "harvest": {},
    "train": {"name": "d1", "folder": "/drafters/d1", "step": 100, "seconds": 50.0},
    "evaluate": {
        "drafter_sha256": "d" * 64,
        "tau": _TAU,
        "conversations": 20,
        "baseline": {
            "drafter_sha256": "b" * 64,
            "tau": {"pooled": 2.0},
            "delta": 0.5,
            "delta_ci": [0.4, 0.6],
        },
    },
    "preflight": {"ok": True, "checks": []},
    "verify": {"ok": True},
    "promote": {
        "decision": "promoted",
        "version": "2",
        "previous": "1",
        "reasons": [],
        "drafter_sha256": "d" * 64,
    },
    "rollout": {
        "decision": "advanced",
        "champion": "2",
        "why": "every replica drafts with it",
    },
}


def states(cfg: Config) -> list[tuple[int, str]]:
    """(number, state) of every window."""
    return [(one.number, one.state) for one in windows.read(cfg.table("windows"))]


def last(cfg: Config) -> Window:
    return windows.read(cfg.table("windows"))[-1]
