"""One run, whatever executes it: workers, shards, kills, and what a plan says before."""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from dflash.checkpoint import load_drafter, save_drafter
from dflash.model import new_drafter
from dflash.target_model import load_target
from jobs import train
from jobs.base.config import load
from jobs.base.drafter_shape import drafter_config
from jobs.base.placement import Node
from jobs.tracking.mlflow_runs import Tracker
from jobs.training import plan, ray_trainer
from jobs.training.feed import training_set, val_requests
from jobs.training.runs import live_pin, run_name
from jobs.training.states import (
    commit_state,
    find_states,
    newest_state,
    read_state,
    states_folder,
)
from tests.helpers.tiny import memorise
from tests.helpers.work import SETTINGS as WORK
from tests.helpers.work import configure, in_one_process, make_base

# 3 samples on 2 workers: a rank has a step without a second sample. Small steps: float order grows.
SETTINGS = ["train.batch_size=3", "train.steps=40", "train.val_every=20", "train.lr=2e-3"]
SETTINGS += ["train.checkpoint_every=8", "train.seed=3", "train.val_samples=3"]


@pytest.fixture
def fresh(harvested, tmp_path):
    """A work folder of its own, so that equal settings train again."""
    return shutil.copytree(harvested, tmp_path / "work")


@pytest.fixture(scope="module")
def one(work):
    """The run on one worker, undisturbed: (summary, loss by step, weights)."""
    return outcome(configure(work, *SETTINGS))


def outcome(cfg):
    summary = train.run(cfg)
    losses = dict(Tracker.start(cfg, summary["name"], {}).curve("loss"))
    return summary, losses, load_drafter(summary["folder"]).state_dict()


def check_same(found, expected, first_step=1):
    """Same run, same losses and weights up to float order; `found` computed from `first_step`."""
    assert found[0]["name"] == expected[0]["name"], "how it is executed is no part of the run"
    assert sorted(found[1]) == list(range(first_step, 41))
    for step, loss in found[1].items():
        assert loss == pytest.approx(expected[1][step], rel=1e-4)
    for name, tensor in found[2].items():
        torch.testing.assert_close(tensor, expected[2][name], rtol=0.02, atol=2e-3)


def move_state(cfg, name, folder):
    """Put an early state of a finished run where a fresh work folder looks for it."""
    early = sorted(cfg.path("runs", name).glob("step-*.pt"))[0]
    target = folder / "runs" / name
    target.mkdir(parents=True)
    shutil.copy(early, target)
    return int(early.stem.removeprefix("step-"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_worker_continues_on_two(one, work, fresh):
    step = move_state(configure(work), one[0]["name"], fresh)
    assert step == 32
    check_same(outcome(configure(fresh, *SETTINGS, "train.workers=2")), one, step + 1)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_workers_survive_a_sigkill_and_one_worker_continues_them(one, fresh, tmp_path):
    """A worker dies in the middle of a step; Ray Train restarts the group from the last state."""
    cfg = configure(fresh, *SETTINGS, "train.workers=2", "train.micro_batch=1")
    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_a_worker, cfg.path("runs", f".{one[0]['name']}.step"))
        two = outcome(cfg)
        assert 12 <= killed.result() < 40
    check_same(two, one)
    other = shutil.copytree(fresh, tmp_path / "other", ignore=shutil.ignore_patterns("runs"))
    shutil.rmtree(other / "drafters")
    (other / "mlflow.db").unlink()
    step = move_state(cfg, two[0]["name"], other)
    check_same(outcome(configure(other, *SETTINGS)), one, step + 1)


def kill_a_worker(progress):
    """SIGKILL one of our two workers when 12 steps are done; returns the last step before."""
    while not (progress.exists() and int(progress.read_text() or 0) >= 12):
        time.sleep(0.005)
    ours = psutil.Process().children(recursive=True)
    workers = [p for p in ours if "RayTrainWorker" in " ".join(p.cmdline())]
    assert len(workers) == 2
    step = int(progress.read_text() or 40)
    workers[-1].kill()
    return step


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sharded_workers_give_the_run_of_one(one, fresh):
    check_same(outcome(configure(fresh, *SETTINGS, "train.workers=2", "train.shard=fsdp")), one)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sharded_factors_and_their_average_resume_and_give_the_run_of_one(harvested, tmp_path):
    """Frozen and trained parameters side by side, a second set of shards, an early state."""
    folders = [shutil.copytree(harvested, tmp_path / name) for name in ("one", "two")]
    base = make_base(configure(folders[0]), tmp_path / "base")
    words = ["train.lora_rank=4", "train.optimizer=adamw", "train.lr=1e-2", "train.ema=0.9"]
    words += [*SETTINGS[:3], *SETTINGS[4:], f"train.base={base}"]
    with in_one_process():
        whole = outcome(configure(folders[0], *words))
    step = move_state(configure(folders[0]), whole[0]["name"], folders[1])
    sharded = configure(folders[1], *words, "train.workers=2", "train.shard=fsdp")
    check_same(outcome(sharded), whole, step + 1)
    assert whole[0]["best_step"] > 0, "something was learned"


@pytest.mark.usefixtures("one_process")
def test_a_domain_with_a_mix_stops_when_nothing_gets_better(fresh, tmp_path):
    """Learning rate 0: the base stays the best, so it is what is exported, after one validation."""
    cfg = configure(fresh)
    base = make_base(cfg, tmp_path / "base")
    words = ["train.domain=a", "train.mix=0.3", "train.patience=1", "train.lr=0.0"]
    cfg = configure(fresh, *SETTINGS, *words, f"train.base={base}")
    summary, losses, _ = outcome(cfg)
    assert len(losses) == 20, "stopped at the first validation, of 40 steps"
    assert summary["best_step"] == 0
    exported = f"{summary['folder']}/model.safetensors"
    assert load_file(exported).keys() == load_file(base / "model.safetensors").keys()
    for name, tensor in load_file(exported).items():
        assert torch.equal(tensor, load_file(base / "model.safetensors")[name])
    data = training_set(cfg, live_pin(cfg), 4)
    picked = [sample.domain for sample in data.samples]
    assert set(picked[: data.num_main]) == {"a"}
    assert set(picked[data.num_main :]) == {"b"}


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_what_a_base_may_lose_is_remembered_by_a_resumed_run(work, fresh, tmp_path):
    """A learning rate that spoils it: the base was best before the interruption and stays it."""
    cfg = configure(work, *SETTINGS)
    requests, target = val_requests(cfg, live_pin(cfg)), load_target(cfg.target_path, torch.float32)
    base = new_drafter(drafter_config(configure(work, "drafter.draft_vocab=0")), 0)
    begun = [request.ids[:8].tolist() for _, request in requests]  # of one length
    memorise(base, target, begun, 20)
    folder = save_drafter(base, tmp_path / "base", torch.bfloat16)
    words = [*SETTINGS, "train.lr=0.5", f"train.base={folder}"]
    spoilt = train.run(configure(work, *words))
    assert spoilt["best_step"] == 0
    assert spoilt["best_val_tau"] > 1.5
    step = move_state(configure(work), spoilt["name"], fresh)
    resumed = outcome(configure(fresh, *words))
    assert min(resumed[1]) == step + 1, "it went on"
    assert (resumed[0]["best_step"], resumed[0]["best_val_tau"]) == (0, spoilt["best_val_tau"])
    expected = load_drafter(folder).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed[2].items())


def test_a_loss_that_is_not_finite_stops_at_once(fresh):
    with pytest.raises(
        ValueError,
        match=r"the (loss|gradient norm) of step \d+ is (nan|inf); its samples: [0-9a-f]{32}",
    ):
        train.run(configure(fresh, *SETTINGS, "train.lr=1e35"))


def test_the_run_is_named_by_what_decides_its_result(work, tmp_path):
    def name(*more):
        cfg = configure(work, *more)
        return run_name(cfg, plan.run_shape(cfg), live_pin(cfg))

    same = ["train.workers=4", "train.device=cpu", "train.shard=fsdp", "train.micro_batch=1"]
    same += ["train.cache_gib=0.5", "train.checkpoint_every=3", "train.readers=1"]
    assert {name(word) for word in same} == {name()}
    other = ["train.seed=1", "train.val_every=3", "train.mix=0.1", "train.max_slice_loss=0.2"]
    other += ["train.domain=b", "train.patience=2"]
    assert len({name("train.domain=a", word) for word in other} | {name()}) == 7
    dtypes = ["train.dtype=bfloat16", "target.dtype=bfloat16", "harvest.features=fp8"]
    assert len({name(), *map(name, dtypes)}) == 4
    shape = drafter_config(configure(work))
    for seed in (1, 2):
        save_drafter(new_drafter(shape, seed), tmp_path / f"base{seed}", torch.bfloat16)
    first, second = (name(f"train.base={tmp_path}/base{seed}") for seed in (1, 2))
    assert first != second
    shutil.copytree(tmp_path / "base1", tmp_path / "moved")
    assert name(f"train.base={tmp_path}/moved") == first, "the weights count, not their place"
    shutil.copytree(tmp_path / "base2", tmp_path / "base1", dirs_exist_ok=True)
    assert name(f"train.base={tmp_path}/base1") == second


def test_settings_that_need_what_is_not_there_are_refused_before_ray(work, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "cluster", lambda cfg: pytest.fail("Ray was started"))
    with pytest.raises(ValueError, match=r"'law' has no training sample; there are: a, b"):
        train.run(configure(work, "train.domain=law"))
    lora = ["train.lora_rank=4", "train.optimizer=adamw", "train.lora_targets=[q_proj,query]"]
    base = make_base(configure(work), tmp_path / "base")
    with pytest.raises(ValueError, match=r"query names no matrix.*choose from fc, q_proj"):
        train.run(configure(work, f"train.base={base}", *lora))
    given(monkeypatch, Node(8, 1))
    said = r"train.workers=2 with 1 CPUs and 1 GPUs each .*1 GPUs, room for 1. Lower train.workers"
    with pytest.raises(ValueError, match=said + ", or set train.device=cpu"):
        ray_trainer.scaling(configure(work, "train.device=cuda", "train.workers=2"))
    on_gpu = ray_trainer.scaling(configure(work, "train.workers=1"))
    assert on_gpu.use_gpu
    assert on_gpu.resources_per_worker == {"CPU": 8, "GPU": 1}
    assert not ray_trainer.scaling(configure(work, "train.device=cpu")).use_gpu
    said = r"train.workers=9 with 1 CPUs each do not fit: Ray has 1 node of 8 CPUs and 1 GPUs"
    with pytest.raises(ValueError, match=said):
        ray_trainer.scaling(configure(work, "train.workers=9"))


def given(monkeypatch, *nodes):
    monkeypatch.setattr(ray_trainer, "cluster_nodes", lambda: ([*nodes], [*nodes]))


def test_what_mlflow_would_try_for_minutes_is_one_message(work, tmp_path):
    with pytest.raises(ValueError, match=r"mlflow.uri http://127.0.0.1:9 does not answer"):
        train.run(configure(work, "train.seed=21", "mlflow.uri=http://127.0.0.1:9"))
    deleted = MlflowClient(f"sqlite:///{tmp_path}/deleted.db")
    deleted.delete_experiment(deleted.create_experiment("flywheel"))
    with pytest.raises(ValueError, match=r"experiment 'flywheel' is deleted: `mlflow experiments"):
        train.run(configure(work, "train.seed=21", f"mlflow.uri=sqlite:///{tmp_path}/deleted.db"))
    (tmp_path / "broken.db").write_bytes(b"?" * 99)
    with pytest.raises(ValueError, match=r"broken.db is not an SQLite database: restore it"):
        train.run(configure(work, "train.seed=21", f"mlflow.uri=sqlite:///{tmp_path}/broken.db"))


@pytest.mark.usefixtures("one_process")
def test_a_damaged_result_is_one_message_and_can_be_had_again(work):
    cfg = configure(work, *SETTINGS, "train.steps=8", "train.seed=22")
    weights = Path(train.run(cfg)["folder"]) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:999])
    with pytest.raises(ValueError, match=r"Remove .* and run the same command"):
        train.run(cfg)
    (weights.parent / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json and is in the way"):
        train.run(cfg)
    shutil.rmtree(weights.parent)
    assert train.run(cfg)["reused"] is False
    assert weights.read_bytes() == whole


def test_the_newest_complete_state_is_resumed(work_url, tmp_path):
    cfg = load(None, [f"work={work_url}", f"scratch={tmp_path / 'scratch'}"])
    folder = states_folder(cfg, "run")
    assert newest_state(cfg, "run") is None
    for step in (8, 16, 24):
        commit_state(cfg, "run", step, {"step": step})
    (folder / ".step-00000032.pt.0badf00d.tmp").write_bytes(b"killed while writing")
    newest = newest_state(cfg, "run")
    assert newest is not None
    assert read_state(newest) == {"step": 24}
    newest.write_bytes(b"half a disk")
    with pytest.raises(ValueError, match=r"step-00000024.pt is damaged .* remove it"):
        read_state(newest)
    commit_state(cfg, "run", 40, {"step": 40})
    kept = ["step-00000024.pt", "step-00000040.pt"]
    assert sorted(p.name for p in folder.iterdir()) == sorted(find_states(cfg, "run")) == kept


def test_plan_tells_start_resume_and_reuse_and_its_numbers_hold(work, fresh, one):
    """Checked against the run on one worker: amounts exactly or within noise, bytes in a factor."""
    cfg = configure(fresh, *SETTINGS)
    before = set(fresh.rglob("*"))
    found = train.plan(cfg)["plan"]
    assert set(fresh.rglob("*")) == before, "a plan writes nothing"
    assert (found["does"], found["name"]) == ("start", one[0]["name"])
    move_state(configure(work), found["name"], fresh)
    resumed = train.plan(cfg)["plan"]
    assert (resumed["does"], resumed["first_step"]) == ("resume", 32)
    done = train.plan(configure(work, *SETTINGS))["plan"]
    assert (done["does"], done["first_step"]) == ("reuse", 40)

    assert found["checkpoints"].startswith("every 8 steps and the last; 2 are kept")
    assert (found["validations"], found["val_requests"]) == (2, {"a": 3, "b": 3})
    assert found["chosen_by"] == "highest pooled tau"
    unharvested = ["train.loss=kl", "harvest.top_k=5"]
    refused = train.plan(configure(work, *SETTINGS, *unharvested))["plan"]
    assert refused["does"] == "refuse"
    assert "run `flywheel harvest`" in refused["features"]
    many = train.plan(configure(work, *SETTINGS, "train.anchors=10000"))["plan"]
    assert sum(many["memory_bytes"].values()) < 2 * sum(found["memory_bytes"].values())
    words = ["train.domain=a", f"train.base={one[0]['folder']}"]
    adapting = train.plan(configure(work, *SETTINGS, *words))["plan"]
    kept = "highest tau of a, no domain with val requests below 95% of the base's"
    assert (adapting["validations"], adapting["chosen_by"]) == (3, kept)

    summary, losses, _ = one
    assert found["steps"] == len(losses)
    assert found["samples"] == summary["samples"]
    slots = summary["slots_per_second"] * summary["seconds"] / 40
    assert found["block_tokens_per_step"] == pytest.approx(slots, rel=0.02)
    state = work / "runs" / summary["name"] / "step-00000040.pt"
    assert found["disk_bytes"]["one state"] == pytest.approx(state.stat().st_size, rel=0.25)
    exported = work / "drafters" / summary["name"] / "model.safetensors"
    assert found["disk_bytes"]["drafter"] == pytest.approx(exported.stat().st_size, rel=0.1)
    memory = sum(found["memory_bytes"].values())
    assert memory / 2 < summary["peak_memory_bytes"] < memory * 2


def test_a_plan_notes_what_its_numbers_mean():
    amount = {"epochs": 13_620.0, "samples": 47}
    epochs, memory = plan._notes(amount, {"total": 2, "free now": 1})
    assert epochs.startswith("13620 epochs of 47 samples")
    assert "train.micro_batch=1" in memory
    assert plan._notes({"epochs": 5.0, "samples": 47}, {"total": 1, "free now": 2}) == []


@pytest.mark.long
@pytest.mark.slow
def test_a_cluster_of_one_cpu_trains_and_refuses_two_workers(fresh):
    """As in a container with `--cpus=1`: Ray would wait for a second CPU for ever."""
    words = [f"work={fresh}", *WORK, *SETTINGS, "train.steps=2", "ray.num_cpus=1"]
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}

    def run(*more):
        command = [sys.executable, "-m", "jobs.train", *words, *more]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)

    two = run("train.workers=2")
    assert two.returncode == 2
    assert "train.workers=2 with 1 CPUs each do not fit: Ray has 1 node of 1 CPUs" in two.stderr
    assert "Traceback" not in two.stderr
    assert run().returncode == 0


def test_workers_get_what_one_machine_can_give(work, monkeypatch, capfd):
    """Four machines of 4 CPUs have 16, but two workers of 8 would never start."""

    def cpus(workers, *nodes, device="cpu"):
        given(monkeypatch, *nodes)
        words = [f"train.workers={workers}", f"train.device={device}"]
        found: Any = ray_trainer.scaling(configure(work, *words)).resources_per_worker
        assert found
        assert found.get("GPU", 0) == (device == "cuda")
        return found["CPU"]

    assert cpus(2, *[Node(4)] * 4) == 4
    assert cpus(5, *[Node(4)] * 4) == 2
    assert cpus(3, Node(8), Node(2)) == 2
    assert cpus(2, Node(8, 1), Node(8, 1), device="cuda") == 8
    assert cpus(2, Node(8, 2), Node(64), device="cuda") == 4
    assert cpus(3, Node(8, 1), Node(8, 1), device="auto") == 4
    said = capfd.readouterr().err
    assert "train: on CPUs, since 3 workers with a GPU each do not fit on 2 nodes of 8 CPUs" in said
