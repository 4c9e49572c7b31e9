"""flywheel watch: looks once or stays, starts a window, and outlives a store that is away."""

import pytest

from jobs.base import cli
from jobs.base.config import load
from pipelines import retrain, watching
from tests.helpers.promotion import make_target
from tests.helpers.retraining import Stages, add_traffic, states


@pytest.fixture
def settings(tmp_path):
    gate, policy = tmp_path / "gate.yaml", tmp_path / "policy.yaml"
    gate.write_text("speed: {required: false}")
    policy.write_text("tokens: {min: 500}\nschedule: {hours: 0}")
    found = [f"work={tmp_path / 'work'}", f"promote.gate={gate}", "retrain.min_tokens=500"]
    make_target(load(None, found))
    return [*found, f"watch.policy={policy}"]


@pytest.fixture
def stages(monkeypatch):
    from contextlib import nullcontext

    monkeypatch.setattr(retrain, "cluster", lambda cfg: nullcontext())
    return Stages(monkeypatch)


def test_it_says_by_its_code_whether_it_is_time(settings, stages):
    cfg = load(None, settings)
    add_traffic(cfg, range(3))
    assert cli.main(["watch", *settings]) == 0
    add_traffic(cfg, range(3, 6), log="later")
    assert cli.main(["watch", *settings]) == watching.FIRED == 4
    assert cli.main(["watch", "--plan", *settings]) == 0
    assert (stages.take(), states(cfg)) == (["ingest", "ingest"], [])
    assert cli.main(["watch", *settings, "watch.run=true"]) == 0
    assert states(cfg) == [(1, "promoted")]
    assert cli.main(["watch", *settings, "watch.run=true"]) == 0  # nothing is new
    assert states(cfg) == [(1, "promoted")]


def test_an_interrupted_window_is_finished(settings, stages):
    cfg = load(None, [*settings, "watch.run=true"])
    add_traffic(cfg, range(6))
    stages.fail.add("evaluate")
    assert cli.main(["watch", *settings, "watch.run=true"]) == 2
    assert states(cfg) == [(1, "failed")]
    stages.fail.clear()
    found = watching.run(cfg)
    assert [t["name"] for t in found["triggers"] if t["fires"]] == ["unfinished", "tokens of a"]
    assert found["retrain"]["state"] == "promoted"


def test_it_stays_through_faults_and_waits_longer(settings, stages, monkeypatch, capsys):
    cfg = load(None, [*settings, "watch.run=true", "watch.stay=true", "watch.poll=10"])
    add_traffic(cfg, range(6))
    waits, faults = [], [OSError("the store is away")] * 3 + [None, KeyboardInterrupt()]

    def ingest(cfg):
        fault = faults.pop(0)
        if fault:
            raise fault
        return {"logs": 1}

    monkeypatch.setattr(watching.ingest, "run", lambda cfg: ingest(cfg) if faults else {})
    monkeypatch.setattr(watching.time, "sleep", waits.append)
    monkeypatch.setattr(watching.retrain, "run", lambda cfg: {"state": "promoted"})
    done = watching.run(cfg)
    assert waits == [20, 40, 80, 10]
    assert done["retrain"] == {"state": "promoted"}
    assert capsys.readouterr().err.count("the store is away; it is tried again") == 1


def test_a_policy_that_cannot_be_read_ends_it_at_once(settings, tmp_path, stages):
    (tmp_path / "policy.yaml").write_text("tokns: {min: 5}")
    assert cli.main(["watch", *settings, "watch.stay=true"]) == 2
    assert cli.main(["retrain", *settings]) == 2
    assert stages.take() == []
