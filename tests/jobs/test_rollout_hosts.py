"""Roll-outs beside one another, from several hosts, and over replicas that restart."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from jobs import rollout
from jobs.reconciling.observed import FLEET_STATE
from jobs.reconciling.reconciler import reconciling
from store import promotions
from tests.helpers.fake_replica import FakeReplica
from tests.helpers.promotion import make_registry
from tests.helpers.rollouts import fleet, promote_two

GOOD, DEAD = {"": 0.6}, {"": 0.0}


def test_two_roll_outs_do_not_fight(start_fleet):
    with start_fleet(GOOD, GOOD) as one, reconciling(one.cfg):
        one.cfg = one.cfg.override("rollout", wait=0.5)
        found = one.run()
        assert (found["ok"], found["decision"]) == (False, "held")
        assert re.match(r"another roll-out is running: .*@", found["why"])
        assert one.loaded() == ["1", "1"]


def test_a_roll_out_waits_for_another_one(start_fleet, capsys):
    with start_fleet(GOOD, GOOD) as one:
        with ThreadPoolExecutor() as pool:
            with reconciling(one.cfg):
                second = pool.submit(one.run)
                while "waiting for up to rollout.wait" not in (told := capsys.readouterr().err):
                    assert not second.done(), told
                    time.sleep(0.1)
            assert second.result()["decision"] == "advanced"
        assert one.loaded() == ["2", "2"]


def test_another_host_goes_on_with_a_roll_out_in_a_bucket(s3_env, empty_database, tmp_path):
    """They share the bucket and the registry, no folder."""
    url, target = s3_env.url(), f"target.path={tmp_path / 'one' / 'target'}"
    where = [f"work={url}", f"scratch={tmp_path / 'one'}", target]
    cfg = make_registry(url, empty_database, *where[1:])
    promote_two(cfg)
    with fleet(where, tmp_path, [GOOD, GOOD]) as one:
        for fake in one.fakes:
            fake.per_look = 30
        full, one.cfg = one.cfg, one.cfg.override("rollout", wait=0.0)
        first = one.run()
        assert first["decision"] == "held", "one look is too little"
        assert one.loaded() == ["2", "1"]
        number = str(first["rollout"])
        looks = len(list(cfg.place("rollouts", number).objects()))
        other = replace(full, scratch=str(tmp_path / "other"))
        other = replace(
            other, mlflow=replace(full.mlflow, uri=f"sqlite:///{cfg.path('mlflow.db')}")
        )
        found = rollout.run(other)
        assert (found["decision"], found["rollout"]) == ("advanced", int(number)), found
        assert one.loaded() == ["2", "2"]
        assert len(list(cfg.place("rollouts", number).objects())) > looks > 0
        assert cfg.place("rollouts").read(f"{number}.svg")
        assert one.run()["decision"] == "unchanged"


def test_another_shape_is_restarted_by_who_runs_the_fleet(start_fleet):
    with start_fleet(GOOD, GOOD, settings=["rollout.restart_wait=1"]) as one:
        one.fakes[0].faults.add("restart")
        found = one.run()
        assert found["decision"] == "held"
        assert "start this replica again with version 2" in found["faults"][0]
        state = {"replicas": one.cfg.rollout.replicas, "token_file": one.cfg.rollout.token_file}
        one.cfg.path(FLEET_STATE).write_text(json.dumps(state))
        one.cfg = one.cfg.override("rollout", replicas=[], token_file="")
        found = one.run()
        assert "did not come back" in found["faults"][0]
        wanted = json.loads(one.cfg.path("fleet_wanted.json").read_text())
        assert wanted["replicas"][one.fakes[0].url] == {"version": "2", "sha256": one.sha["2"]}


def test_a_restarted_replica_has_another_address_and_is_the_canary_still(start_fleet):
    """`flywheel fleet up` starts the new server beside the old one."""
    with start_fleet(GOOD, GOOD, replicas=3) as one:
        old, other, new = one.fakes
        old.faults.add("restart")
        new.active = new.active | {"version": "2", "sha256": one.sha["2"]}
        state, wanted = one.cfg.path(FLEET_STATE), one.cfg.path("fleet_wanted.json")

        def runs(*fakes: FakeReplica) -> None:
            known = {"replicas": [fake.url for fake in fakes]}
            state.write_text(json.dumps(known | {"token_file": one.cfg.rollout.token_file}))

        def restart() -> None:
            while not wanted.is_file():
                time.sleep(0.05)
            runs(new, other)

        runs(old, other)
        full = one.cfg
        one.cfg = one.cfg.override("rollout", replicas=[])
        with ThreadPoolExecutor() as pool:
            pool.submit(restart)
            found = one.run()
        assert found["decision"] == "advanced", found
        assert [fake.active["version"] for fake in (new, other)] == ["2", "2"]
        rows = promotions.read(full.table("promotions"))
        chosen = [r["evidence"] for r in rows if r["action"] == "rollout-canary"]
        assert new.url in str(chosen[-1])
