"""One window of retraining: what belongs to it, in what order it runs, and how it goes on."""

import json
import multiprocessing
import os
import time
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from jobs.base import cli
from jobs.base.config import load
from jobs.upkeep.pins import kept_versions
from pipelines import retrain
from store import windows
from store.lease import Lost, lease
from store.schemas import WINDOWS
from store.tables import Table
from tests.helpers.promotion import make_target
from tests.helpers.retraining import NOON, Stages, add_traffic, last, states

ALL = ["ingest", "select", "harvest", "train", "evaluate", "preflight", "promote"]


@pytest.fixture
def cfg(tmp_path):
    gate = tmp_path / "gate.yaml"
    gate.write_text("speed: {required: false}")
    settings = ["retrain.min_tokens=500", "retrain.mix=0"]  # nothing is really selected
    made = load(None, [f"work={tmp_path / 'work'}", f"promote.gate={gate}", *settings])
    make_target(made)
    return made


@pytest.fixture
def stages(monkeypatch):
    # Ray starts for seconds, and no stage here needs it.
    monkeypatch.setattr(retrain, "cluster", lambda cfg: nullcontext())
    return Stages(monkeypatch)


def test_a_window_runs_once_in_order(cfg, stages):
    add_traffic(cfg, range(10))
    done = retrain.run(cfg)
    assert stages.take() == ALL
    assert (done["window"], done["state"], done["tokens"]) == (1, "promoted", {"a": 1000})
    window = last(cfg)
    assert [*window.rows] == ["window", *ALL[:-1], "verify", "promote", "rollout"]
    assert window.rows["rollout"]["state"] == "skipped"
    assert "no replica is known" in window.rows["rollout"]["reason"]
    assert (window.whole["captured_from"], window.whole["captured_to"]) == (
        NOON,
        NOON + timedelta(seconds=9),
    )
    # Later stages read what earlier ones of this window made.
    assert stages.seen["evaluate"].select.version == 7
    assert stages.seen["promote"].promote.drafter == "/drafters/d1"
    assert stages.seen["train"].train.fresh


def test_the_same_window_twice_does_nothing(cfg, stages):
    add_traffic(cfg, range(10))
    retrain.run(cfg)
    stages.take()
    version = cfg.table("windows").version()
    assert retrain.run(cfg)["state"] == "nothing new"
    assert stages.take() == ["ingest"]
    assert cfg.table("windows").version() == version


@pytest.mark.parametrize("step", ["select", "train", "promote"])
def test_it_goes_on_at_the_step_that_failed(cfg, stages, step):
    add_traffic(cfg, range(10))
    stages.fail.add(step)
    with pytest.raises(ValueError, match=f"{step} broke"):
        retrain.run(cfg)
    assert last(cfg).state == "failed"
    assert last(cfg).whole["reason"] == f"{step}: {step} broke: mend it"
    assert stages.take() == ALL[: ALL.index(step) + 1]
    stages.fail.clear()
    add_traffic(cfg, range(10, 20), log="later")
    assert retrain.run(cfg)["state"] == "promoted"
    assert stages.take() == ALL[ALL.index(step) :]
    assert retrain.run(cfg)["window"] == 2  # what came meanwhile
    assert states(cfg) == [(1, "promoted"), (2, "promoted")]


def test_too_little_is_skipped_and_belongs_to_the_next_window(cfg, stages):
    add_traffic(cfg, range(3))
    assert retrain.run(cfg)["state"] == "skipped"
    assert last(cfg).whole["reason"] == "too few tokens: 300 new ones, retrain.min_tokens is 500"
    version = cfg.table("windows").version()
    assert retrain.run(cfg)["state"] == "skipped"
    assert cfg.table("windows").version() == version
    add_traffic(cfg, range(3, 6), log="later")
    done = retrain.run(cfg)
    assert (done["window"], done["state"], done["tokens"]) == (1, "promoted", {"a": 600})
    assert stages.take() == ["ingest", "ingest", *ALL]
    assert states(cfg) == [(1, "promoted")]


@pytest.mark.parametrize(
    ("step", "answer", "state", "reason"),
    [
        ("promote", {"decision": "held", "reasons": ["gain: few"]}, "held", "gate: gain: few"),
        ("promote", {"decision": "refused", "reasons": ["tau"]}, "refused", "gate: tau"),
        ("verify", {"ok": False, "faults": ["text differs"]}, "refused", "verify: text differs"),
        (
            "preflight",
            {"ok": False, "checks": [{"name": "drafts", "status": "fail"}]},
            "refused",
            "preflight: drafts",
        ),
        ("rollout", {"decision": "rolled back", "why": "slow"}, "rolled back", "rollout: slow"),
        (
            "rollout",
            {"decision": "unchanged", "champion": "1"},
            "rolled back",
            "rollout: the champion is version 1 now, not 2",
        ),
    ],
)
def test_what_is_decided_about_a_drafter_is_no_error(
    cfg, stages, monkeypatch, step, answer, state, reason
):
    monkeypatch.setattr(retrain, "_needless", lambda cfg, name: "")
    add_traffic(cfg, range(10))
    stages.answers[step] = answer
    done = retrain.run(cfg)
    assert (done["state"], done["reason"]) == (state, reason)
    assert done.get("ok", True)
    assert retrain.run(cfg)["state"] == "nothing new"  # its samples are used


def test_a_roll_out_that_waits_goes_on_with_the_next_command(cfg, stages, monkeypatch):
    monkeypatch.setattr(retrain, "_needless", lambda cfg, name: "")
    add_traffic(cfg, range(10))
    stages.answers["rollout"] = {"decision": "held", "why": "too few answers"}
    assert retrain.run(cfg)["state"] == "waiting"
    stages.take()
    stages.answers.clear()
    assert retrain.run(cfg)["state"] == "promoted"
    assert stages.take() == ["rollout"]


def test_a_drafter_that_a_killed_command_promoted_counts_as_promoted(cfg, stages):
    """The second promote says `unchanged`, of a champion that was not there when it began."""
    add_traffic(cfg, range(10))
    stages.answers["promote"] = {"decision": "unchanged"}
    assert retrain.run(cfg)["state"] == "promoted"


def test_fresh_leaves_a_window_that_cannot_be_finished(cfg, stages):
    add_traffic(cfg, range(10))
    stages.fail.add("train")
    with pytest.raises(ValueError, match="broke"):
        retrain.run(cfg)
    stages.fail.clear()
    done = retrain.run(cfg.override("retrain", fresh=True))
    assert (done["window"], done["tokens"]) == (2, {"a": 1000})  # its samples are not lost
    assert states(cfg) == [(1, "abandoned"), (2, "promoted")]


# What belongs to a window.


def test_a_log_that_grew_brings_only_its_new_samples(cfg, stages):
    add_traffic(cfg, range(10), log="short")
    retrain.run(cfg)
    table = cfg.table("traffic")
    table.change(lambda live: ([], list(live)))  # as ingest replaces a log by its longer version
    add_traffic(cfg, range(16), log="long")
    assert retrain.run(cfg)["tokens"] == {"a": 600}


def test_late_and_future_rows_and_a_clock_set_back_lose_nothing(cfg, stages):
    add_traffic(cfg, range(10))
    retrain.run(cfg)
    add_traffic(cfg, range(10, 20), "late", "1", at=NOON - timedelta(days=300))
    add_traffic(cfg, range(20, 30), "future", "2", at=NOON + timedelta(days=36_000))
    add_traffic(cfg, range(30, 40), "none", "3", captured_at=None)
    tokens = {"late": 1000, "future": 1000, "none": 1000}
    assert retrain.run(cfg)["tokens"] == tokens
    assert retrain.run(cfg)["state"] == "nothing new"
    add_traffic(cfg, range(40, 50), log="4", at=NOON - timedelta(days=1))  # the clock is set back
    assert retrain.run(cfg)["tokens"] == {"a": 1000}


def test_compaction_of_traffic_makes_nothing_new(cfg, stages):
    for i in range(2):
        add_traffic(cfg, range(5 * i, 5 * i + 5), log=f"l{i}")
    retrain.run(cfg)
    table = cfg.table("traffic")
    version, whole = table.version(), table.write(table.read())
    assert table.change(lambda live: ([whole], list(live))) == version + 1
    assert len(table.shards()) == 1
    assert retrain.run(cfg)["state"] == "nothing new"


def test_gc_keeps_what_the_next_window_is_measured_from(cfg, stages):
    add_traffic(cfg, range(10))
    stages.fail.add("train")
    with pytest.raises(ValueError, match="broke"):
        retrain.run(cfg)
    assert kept_versions(cfg) == {"selection": {7}}
    stages.fail.clear()
    retrain.run(cfg)
    assert kept_versions(cfg) == {"traffic": {cfg.table("traffic").version()}}


def test_a_watermark_that_cannot_be_read_any_more_stops_nothing(cfg, stages):
    add_traffic(cfg, range(10))
    retrain.run(cfg)
    old = cfg.table("traffic").shards()
    cfg.table("traffic").change(lambda live: ([], list(live)))
    cfg.table("traffic").place.delete(list(old))
    add_traffic(cfg, range(20, 30), log="later")
    assert retrain.run(cfg)["tokens"] == {"a": 1000}
    assert "are gone" in last(cfg).rows["ingest"]["reason"]


def test_samples_of_another_target_are_not_new(cfg, stages):
    add_traffic(cfg, range(10), target_id="another")
    assert retrain.run(cfg)["state"] == "nothing new"


# One at a time, and kills.


def test_a_second_one_says_who_retrains(cfg, stages, capsys):
    add_traffic(cfg, range(10))
    settings = [f"work={cfg.work}", f"promote.gate={cfg.promote.gate}", "retrain.min_tokens=500"]
    codes = []
    stages.during["harvest"] = lambda: codes.append(cli.main(["retrain", *settings]))
    assert retrain.run(cfg)["state"] == "promoted"
    assert codes == [retrain.BUSY]
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert f"process {os.getpid()}" in told["held_by"]
    assert stages.take() == ALL


def test_one_that_was_suspended_writes_nothing_over_its_successor(tmp_path, monkeypatch):
    table, place = Table(load(None, [f"work={tmp_path}"]).place("windows"), WINDOWS), None
    place = load(None, [f"work={tmp_path}"]).place("lease")
    window = windows.Window(1)
    shared = dict.fromkeys(("from_version", "to_version", "captured_from", "captured_to"))
    window.put("window", state="running", target_id="t", started_at=datetime.now(UTC), **shared)
    with lease(place) as early:
        first = windows.Writer(table, early)
        first.write(window)
        early.release()
        monkeypatch.setattr(early, "check", lambda: None)
        with lease(place) as later:
            second = windows.Writer(table, later)
            window.put("window", state="promoted")
            second.write(window)
            window.put("window", state="failed")
            with pytest.raises(Lost, match="a later holder has begun"):
                first.write(window)
    assert [one.state for one in windows.read(table)] == ["promoted"]


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_a_clock_that_is_set_in_the_middle(cfg, stages, monkeypatch, ahead):
    """Forward, it ends the lease: nothing more is written, and the same command goes on at the step
    that was running. Back, it changes nothing.
    """
    add_traffic(cfg, range(10))

    def set_clock():
        jumped = SimpleNamespace(time=lambda: time.time() + ahead, monotonic=time.monotonic)
        monkeypatch.setattr("store.lease.time", jumped)

    stages.during["evaluate"] = set_clock
    if ahead > 0:
        with pytest.raises(Lost, match="nothing was committed, run the same command again"):
            retrain.run(cfg)
        assert stages.take() == ALL[: ALL.index("evaluate") + 1]
        assert last(cfg).rows["evaluate"]["state"] == "running"
    assert retrain.run(cfg)["state"] == "promoted"
    assert stages.take() == (ALL[ALL.index("evaluate") :] if ahead > 0 else ALL)
    assert states(cfg) == [(1, "promoted")]
    assert retrain.run(cfg)["state"] == "nothing new"


class Killed(BaseException):
    """Nothing that a stage or a pipeline handles."""


@pytest.mark.parametrize("step", ["ingest", "select", "evaluate"])
def test_ended_in_the_middle_and_run_again(cfg, stages, step):
    def end():
        raise Killed

    add_traffic(cfg, range(10))
    stages.during[step] = end
    with pytest.raises(Killed):
        retrain.run(cfg)
    stages.during.clear()
    stages.take()
    assert retrain.run(cfg)["state"] == "promoted"
    assert stages.take() == ALL[ALL.index(step) :]
    assert states(cfg) == [(1, "promoted")]


def killed_in(step: str, settings: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrain, "cluster", lambda cfg: nullcontext())
        Stages(patch).during[step] = lambda: os._exit(9)
        pytest.fail(f"{retrain.run(load(None, settings))}")


@pytest.mark.slow
def test_killed_with_its_lease_and_run_again(cfg, stages):
    """Nobody waits for the lease of a process that is gone."""
    add_traffic(cfg, range(10))
    settings = [f"work={cfg.work}", f"promote.gate={cfg.promote.gate}", "retrain.min_tokens=500"]
    process = multiprocessing.get_context("spawn").Process(
        target=killed_in, args=("train", settings)
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    assert retrain.run(cfg)["state"] == "promoted"
    assert stages.take() == ALL[ALL.index("train") :]


# Plans.


def test_plan_says_what_would_run_and_changes_nothing(cfg, stages):
    add_traffic(cfg, range(3))
    assert {row["does"] for row in retrain.plan(cfg)["plan"][1:]} == {"skipped"}
    add_traffic(cfg, range(3, 10), log="later")
    found = retrain.plan(cfg)
    assert found["new_tokens"] == {"a": 1000}
    does = {row["step"]: row["does"] for row in found["plan"]}
    assert does == dict.fromkeys(ALL, "runs") | {"verify": "skipped", "rollout": "skipped"}
    assert cfg.table("windows").version() is None
    stages.fail.add("train")
    with pytest.raises(ValueError, match="broke"):
        retrain.run(cfg)
    rows = retrain.plan(cfg)["plan"]
    assert "window 1 goes on: it is failed train: train broke" in rows[0]["why"]
    assert "a new drafter: there is no champion" in rows[0]["why"]
    left = [row["step"] for row in rows]
    assert left == ["train", "evaluate", "preflight", "verify", "promote", "rollout"]
    assert stages.take() == ALL[:4]


def test_prompts_of_a_former_target_are_answered_before_the_window_begins(cfg, stages):
    """They are new samples of it, so that its first drafter need not wait for traffic."""
    former = {"target_id": "former", "ids_source": "served", "prompt_id": "p", "consent": True}
    add_traffic(cfg, range(1), log="old", **former)
    stages.during["regenerate"] = lambda: add_traffic(cfg, range(10))
    step = {"step": "regenerate", "does": "runs", "why": "1 prompts to answer anew"}
    assert retrain.plan(cfg)["plan"][0] == step
    assert retrain.plan(cfg)["plan"][2]["does"] == "runs"
    assert retrain.run(cfg)["state"] == "promoted"
    assert stages.take() == ["regenerate", *ALL]
    row = last(cfg).rows["regenerate"]
    assert (row["place"], row["state"], row["numbers"]["answers"]) == (1, "done", 2)
