"""The benchmark of DFlash 2 on a tiny target: it trains, replays and times all that it reports."""

from dataclasses import replace

import pytest

from bench import dflash2
from dflash.replay import Request
from jobs.base.sections.training import Train

PAIRS = ("qwen3-float32",)


def test_a_race_reports_equal_seconds_and_equal_steps(target, samples, config, monkeypatch):
    monkeypatch.setattr(dflash2, "probe", lambda task, seed: (1.0, 1.5))
    monkeypatch.setattr(dflash2, "TIMED", 2)
    requests = [Request(s.ids, int((~s.loss_mask).sum()), s.features) for s in samples]
    train = replace(Train(), batch_size=4, anchors=12, optimizer="muon", lr=2e-2)
    names = [s.sample_id for s in samples]
    task = dflash2.Task(target, samples, requests, names, train, config)
    found = dflash2.race(task, 0, 30)
    assert [found[n]["steps"] for n in dflash2.NAMES] == [30, 20, 30]
    assert found["dflash"]["tau"] > 1.1
    assert found["ratio"] == found["dflash2"]["tau"] / found["dflash"]["tau"]
    low, high = found["tau_ci"]["dflash2"]
    assert low <= found["dflash2"]["tau"] <= high
    cost = found["round_seconds"]["dflash2"]
    assert 0 < cost["forward"] < cost["draft"]
    one, two = (found["round_seconds"][n] for n in ("dflash", "dflash2"))
    whole = (one["draft"] + one["verify"]) / (two["draft"] + two["verify"])
    assert found["speed_up"] == pytest.approx(found["ratio"] * whole)
