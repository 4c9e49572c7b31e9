"""Roll-outs over fake replicas: who advances, who is held, who goes back, and what a fault does."""

import json
import shutil
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dflash.checkpoint import drafter_sha256
from jobs import rollback, rollout
from jobs.base.config import load
from jobs.reconciling.observed import find_fleet
from jobs.registry.versions import Registry
from store import promotions
from tests.helpers.fake_replica import TOKEN
from tests.helpers.promotion import aliases

GOOD, DEAD = {"": 0.6}, {"": 0.0}


def test_a_good_drafter_advances_over_three_replicas(start_fleet):
    with start_fleet(GOOD, GOOD, replicas=3) as one:
        found = one.run()
        assert found["decision"] == "advanced", found
        assert found["ok"]
        assert one.loaded() == ["2", "2", "2"]
        assert one.actions()[2:] == [("canary", "2"), ("advance", "2")]
        # The others were left alone until the canary had proved itself.
        assert [fake.swaps for fake in one.fakes] == [1, 1, 1]
        assert one.run()["decision"] == "unchanged"
        folder = one.cfg.path("rollouts")
        assert (folder / f"{found['rollout']}.svg").read_text().startswith("<svg")
        evidence = json.loads((folder / f"{found['rollout']}.json").read_text())
        assert evidence["rows"][-1]["evidence"]["verdict"]["answer"] == "advance"


def test_every_address_of_a_name_is_a_replica(start_fleet, monkeypatch):
    """Only the resolver is ours: a headless service has an address for each of its pods."""
    real = socket.getaddrinfo

    def resolve(host, *args, **more):
        found = real("127.0.0.1", *args, **more) if host == "drafters.test" else []
        pods = [(*entry[:4], (f"127.0.0.{i}", entry[4][1])) for entry in found for i in (3, 1, 2)]
        return pods or real(host, *args, **more)

    with start_fleet(GOOD, GOOD, replicas=3, dns="drafters.test") as one:
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        assert find_fleet(one.cfg).urls == [fake.url for fake in one.fakes]
        assert one.run()["decision"] == "advanced"
        assert one.loaded() == ["2", "2", "2"]
        unknown = one.cfg.override("rollout", dns="nobody.invalid:8000")
        with pytest.raises(ValueError, match=r"nobody\.invalid:8000.*is the name right"):
            find_fleet(unknown)


def test_a_dead_drafter_is_stopped_at_the_canary_and_the_registry_goes_back(start_fleet):
    with start_fleet(GOOD, DEAD, replicas=3) as one:
        found = one.run()
        assert found["decision"] == "rolled back", found
        assert not found["ok"]
        assert "all traffic loses" in found["verdict"]["reasons"][0]
        assert "all traffic loses" in found["why"]
        assert one.loaded() == ["1", "1", "1"]
        assert [fake.swaps for fake in one.fakes] == [2, 0, 0]
        assert aliases(one.cfg)["champion"] == "1"
        bad = Registry(one.cfg).get("2")
        assert bad is not None
        assert bad.bad.startswith("roll-out: ")
        assert one.actions()[2:] == [("canary", "2"), ("rollback", "2"), ("rollback", "1")]
        assert one.run()["decision"] == "unchanged"  # it does not try again


def test_a_loss_in_one_domain_goes_back_with_enough_traffic(start_fleet):
    with start_fleet(GOOD, {"a": 0.65, "b": 0.45}, settings=["rollout.max_slice_loss=0.1"]) as one:
        found = one.run()
        assert found["decision"] == "rolled back", found
        assert "domain b loses" in str(found["verdict"]["reasons"])
        assert one.loaded() == ["1", "1"]


def test_too_little_traffic_is_never_a_pass(start_fleet):
    with start_fleet(GOOD, GOOD, settings=["rollout.wait=0"]) as one:
        for fake in one.fakes:
            fake.per_look = 2
        found = one.run()
        assert found["decision"] == "held"
        assert not found["ok"]
        assert "at least 20 of each are needed" in found["why"]
        assert one.loaded() == ["2", "1"]
        assert one.actions()[2:] == [("canary", "2"), ("hold", "2")]
        for fake in one.fakes:
            fake.per_look = 40
        # The next command goes on with the same canary and what was measured.
        one.cfg = one.cfg.override("rollout", wait=40)
        assert one.run()["decision"] == "advanced"
        assert [a for a, _ in one.actions()].count("canary") == 1


def test_a_domain_without_traffic_holds(start_fleet):
    slices = {"a": {"rounds": 50, "tau": 2.0}, "missing": {"rounds": 50, "tau": 2.0}}
    with start_fleet(GOOD, GOOD, settings=["rollout.wait=1"]) as one:
        file = one.cfg.path("evaluations", "d2.json")
        evaluation = json.loads(file.read_text())
        evaluation["tau"]["slices"] = {"domain": slices}
        file.write_text(json.dumps(evaluation))
        found = one.run()
        assert found["decision"] == "held"
        assert "domain missing: 0 conversations of the canary" in found["why"]


def test_a_drafter_for_another_target_never_loads(start_fleet):
    with start_fleet(GOOD, GOOD) as one:
        for fake in one.fakes:
            fake.target_id = "another"
            assert fake.active is not None
            fake.active = fake.active | {"compat": {"target_id": "another"}}
        found = one.run()
        assert found["decision"] == "held"
        assert "is for target" in found["why"]
        assert one.loaded() == ["1", "1"]  # they draft for their own target
        assert not any("PUT" in call or "load" in call for f in one.fakes for call in f.calls)


def test_after_a_change_of_the_target_the_fleet_falls_back_to_no_drafter(start_fleet):
    with start_fleet(GOOD, GOOD) as one:
        for fake in one.fakes:
            fake.target_id = "a newer target"
        assert one.run()["decision"] == "held"
        assert one.loaded() == ["none", "none"]
        assert ("fallback", "2") in one.actions()
        before = len(one.actions())
        assert one.run()["decision"] == "held"
        assert len(one.actions()) <= before + 1


def test_without_an_earlier_champion_a_bad_one_falls_back_to_the_floor(start_fleet):
    with start_fleet(GOOD, DEAD, serving="") as one:
        Registry(one.cfg).client.delete_model_version("drafter", "1")
        assert one.run()["decision"] == "rolled back"
        assert one.loaded() == ["none", "none"]
        found = [action for action, _ in one.actions()]
        assert found[2:5] == ["canary", "rollback", "fallback"]
        assert one.run()["decision"] == "held"


def test_a_first_champion_is_compared_with_no_drafter(start_fleet):
    with start_fleet(GOOD, GOOD, serving="") as one:
        assert one.run()["decision"] == "advanced"
        assert one.loaded() == ["2", "2"]


def test_a_replica_alone_is_compared_with_its_own_past(start_fleet, capsys):
    with start_fleet(GOOD, {"": 0.3}, replicas=1) as one:
        one.fakes[0].finish_requests(400)
        assert one.run()["decision"] == "rolled back"
        assert one.loaded() == ["1"]
        assert "which is weaker" in capsys.readouterr().err


def test_a_canary_that_fails_requests_goes_back(start_fleet):
    with start_fleet(GOOD, GOOD, settings=["rollout.max_loss=0.001"]) as one:
        for fake in one.fakes:
            fake.fail_share = {one.sha["2"]: 0.2}
        found = one.run()
        assert found["decision"] == "rolled back"
        assert "failed" in str(found["verdict"]["reasons"])


@pytest.mark.parametrize("fault", ["refuse", "verify", "wrong"])
def test_a_drafter_that_a_canary_cannot_serve_goes_back(start_fleet, fault):
    with start_fleet(GOOD, GOOD) as one:
        one.fakes[0].faults.add(fault)
        assert one.run()["decision"] == "rolled back"
        assert aliases(one.cfg)["champion"] == "1"
        assert one.loaded() == ["1", "1"]


@pytest.mark.parametrize("moment", ["load", "activate"])
def test_a_replica_killed_in_the_swap_comes_back_with_the_right_version(start_fleet, moment):
    with start_fleet(GOOD, GOOD) as one:
        one.fakes[0].faults.add(f"die-{moment}")  # it restarts with what it was started with
        assert one.run()["decision"] == "advanced"
        assert one.loaded() == ["2", "2"]
        one.fakes[1].restart()
        assert one.loaded() == ["2", "1"]
        assert one.run()["decision"] == "brought"
        assert one.loaded() == ["2", "2"]


def test_a_drafter_that_kills_its_canary_goes_back(start_fleet):
    with start_fleet(GOOD, GOOD) as one:
        one.fakes[0].faults |= {"die-activate", "again"}
        done = one.run()
        assert done["decision"] == "rolled back"
        assert "died 2 times while it took it" in done["why"]
        assert one.loaded() == ["1", "1"]
        assert one.fakes[0].calls.count("POST /flywheel/activate") == 2


def test_a_replica_that_restarts_with_the_new_version_waits_for_the_canary(start_fleet):
    with start_fleet(GOOD, GOOD, replicas=3, settings=["rollout.wait=0"]) as one:
        for fake in one.fakes:
            fake.per_look = 2
            assert fake.active is not None
            fake.active = fake.active | {"version": "d1"}  # served from a folder
        one.run()
        assert one.loaded() == ["2", "d1", "d1"]
        one.fakes[2].active = one.fakes[0].active
        one.run()
        assert [fake.sha for fake in one.fakes] == [one.sha[v] for v in "211"]


def test_counters_that_start_anew_are_no_failures(start_fleet):
    with start_fleet(GOOD, GOOD, settings=["rollout.wait=0", "rollout.max_loss=0.001"]) as one:
        one.run()
        one.fakes[1].finish_requests(500)
        one.run()
        one.fakes[1].restart()
        one.fakes[0].on_restart = one.fakes[0].active
        one.fakes[0].restart()
        found = one.run()
        asked = found["verdict"]["guards"]["failed"]
        assert asked["canary"][0] == asked["rest"][0] == 0
        assert asked["rest"][1] >= 500
        assert found["verdict"]["answers"][0] > 80


def test_a_watching_roll_out_survives_faults_and_ends_with_ctrl_c(start_fleet, monkeypatch, capsys):
    with start_fleet(GOOD, GOOD, settings=["rollout.watch=true"]) as one:
        told: list[str] = []

        def once_more(_: float) -> None:
            told.append(capsys.readouterr().err)
            if len(told) == 3:
                raise KeyboardInterrupt
            one.cfg.path("freeze.json").unlink(missing_ok=True)

        one.cfg.path("freeze.json").write_text("no JSON")
        monkeypatch.setattr(rollout, "time", SimpleNamespace(sleep=once_more))
        found = one.run()
        assert found["ok"]
        assert "freeze.json is damaged" in told[0]
        assert one.loaded() == ["2", "2"]
        assert told[2] == ""  # nothing new, nothing told


def test_a_frozen_fleet_is_only_observed(start_fleet):
    with start_fleet(GOOD, GOOD) as one:
        rollout.run(one.cfg.override("rollout", freeze="on", reason="audit"))
        found = one.run()
        assert found["decision"] == "frozen"
        assert "audit" in found["why"]
        assert [step["step"] for step in rollout.plan(one.cfg)["steps"]] == ["frozen"]
        assert one.loaded() == ["1", "1"]
        rollout.run(one.cfg.override("rollout", freeze="off"))
        assert one.run()["decision"] == "advanced"


def test_a_plan_changes_nothing(start_fleet):
    with start_fleet(GOOD, GOOD) as one:
        rows = len(promotions.read(one.cfg.table("promotions")))
        found = rollout.plan(one.cfg)
        assert found["steps"][0]["step"] == "canary"
        assert len(promotions.read(one.cfg.table("promotions"))) == rows
        assert one.loaded() == ["1", "1"]


def test_a_rollback_moves_registry_and_fleet(start_fleet):
    with start_fleet(GOOD, GOOD, serving="2") as one:
        found = rollback.run(one.cfg)
        assert found["fleet"]["ok"], found
        assert one.loaded() == ["1", "1"]
        assert one.run()["decision"] == "unchanged"


def test_without_replicas_or_a_registry_nothing_is_written(tmp_path):
    work = tmp_path / "misspelled"
    with pytest.raises(ValueError, match="no replica is known"):
        rollout.run(load(None, [f"work={work}"]))
    away = load(None, [f"work={work}", "rollout.replicas=[http://127.0.0.1:9]"])
    assert rollout.plan(away)["steps"][0]["step"] == "hold"
    assert not work.exists()


def test_a_majority_that_is_gone_holds(start_fleet):
    with start_fleet(GOOD, GOOD, replicas=3) as one:
        for fake in one.fakes[1:]:
            fake.faults.add("hang")
        one.cfg = one.cfg.override("rollout", timeout=0.3)
        found = one.run()
        assert found["decision"] == "held"
        assert "2 of 3 replicas" in found["why"]
        assert one.loaded() == ["1", "1", "1"]


def test_hostile_domains_are_only_text(start_fleet, capsys):
    domain = "\x1b[31m[red]$x$</text><script>"
    with start_fleet(GOOD, GOOD, settings=["rollout.wait=40"]) as one:
        for fake in one.fakes:
            fake.domains = (domain,)
            fake.finish_requests(10)
        assert one.run()["decision"] == "advanced"
        assert "\x1b[31m[red]" not in capsys.readouterr().err
        svg = next(one.cfg.path("rollouts").glob("*.svg")).read_text()
        assert "<script>" not in svg


def test_a_version_deleted_meanwhile_leaves_the_canary(start_fleet):
    with start_fleet(GOOD, GOOD, settings=["rollout.wait=0"]) as one:
        for fake in one.fakes:
            fake.per_look = 2
        one.run()
        assert one.loaded() == ["2", "1"]
        Registry(one.cfg).client.delete_model_version("drafter", "2")
        assert one.run()["decision"] == "held"
        assert one.loaded() == ["1", "1"]


def test_a_registry_that_is_away_is_named_and_nothing_changes(start_fleet, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with start_fleet(GOOD, GOOD) as one:
        away = replace(one.cfg, mlflow=replace(one.cfg.mlflow, uri="http://127.0.0.1:9"))
        with pytest.raises(ValueError, match="start the MLflow server there"):
            rollout.run(away)
        assert one.loaded() == ["1", "1"]
        assert one.run()["decision"] == "advanced"


def test_a_damaged_drafter_is_not_delivered(start_fleet):
    with start_fleet(GOOD, GOOD) as one:
        version = Registry(one.cfg).get("2")
        assert version is not None
        folder = Registry(one.cfg).open(version)
        kept = shutil.copytree(folder, one.cfg.path("kept"))
        (folder / "config.json").write_text("{}")
        try:
            found = one.run()
        finally:
            shutil.rmtree(folder)
            shutil.copytree(kept, folder)
        assert found["decision"] == "held"
        assert one.loaded() == ["1", "1"]
        assert drafter_sha256(folder) == version.sha256


def test_the_token_is_nowhere_in_what_is_written(start_fleet, capsys):
    with start_fleet(GOOD, DEAD) as one:
        one.run()
        told = capsys.readouterr()
        assert TOKEN not in told.err + told.out
        for path in one.cfg.path().rglob("*"):
            if path.is_file():
                assert TOKEN.encode() not in path.read_bytes()
