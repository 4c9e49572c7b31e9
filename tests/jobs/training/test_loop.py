"""Ingest, harvest, train and evaluate in a row, on a tiny target: real Ray, Parquet and MLflow."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from dflash.acceptance import tau
from dflash.checkpoint import convert_folder, read_config, save_drafter
from dflash.model import new_drafter
from dflash.target_model import load_target
from jobs import evaluate, harvest, train
from jobs.base.config import load
from jobs.base.drafter_shape import drafter_config
from jobs.dataset.samples import features_place
from jobs.tracking.mlflow_runs import Tracker
from jobs.training.feed import LazySamples, training_features, training_set
from jobs.training.runs import live_pin
from jobs.training.states import has_ended, is_unfinished, read_result
from store.feature_index import index_of
from tests.helpers.work import SETTINGS, configure, make_base


def first_sample(cfg):
    data = training_set(cfg, live_pin(cfg), 4)
    return LazySamples(data.samples, training_features(cfg, data))[0]


def test_harvest_stores_the_targets_features_and_reuses_them(work):
    cfg = configure(work)
    again = harvest.run(cfg)
    assert again["samples"] == 0
    index = index_of(cfg.table("feature_index"), features_place(cfg).name)
    assert index.num_rows == again["reused"]
    target = load_target(cfg.target_path, torch.float32)
    sample = first_sample(cfg)
    expected = target.features([sample.ids.tolist()], drafter_config(cfg).target_layer_ids)[0].taps
    torch.testing.assert_close(sample.features, expected.bfloat16(), rtol=1e-2, atol=1e-2)


def test_train_then_evaluate(work):
    cfg = configure(work)
    interrupt = signal.getsignal(signal.SIGINT)
    trained = train.run(cfg)
    assert signal.getsignal(signal.SIGINT) is interrupt, "Ctrl-C no longer interrupts later stages"
    assert train.run(cfg)["reused"] is True
    [run] = MlflowClient(cfg.mlflow_uri).search_runs(
        ["1"], f"tags.`flywheel.run` = '{trained['name']}'"
    )
    assert run.data.metrics["val_tau"] >= 1.0
    assert run.inputs is not None
    assert run.inputs.dataset_inputs[0].dataset.name == "traffic"
    losses = MlflowClient(cfg.mlflow_uri).get_metric_history(run.info.run_id, "loss")
    assert [m.step for m in losses] == list(range(1, 13))
    assert {"train_accuracy_4", "val_tau/a", "val_tau/b", "peak_memory_bytes"} <= {
        *run.data.metrics
    }
    assert run.data.tags["execution.workers"] == "1"
    assert run.data.params["anchors"] == str(cfg.train.anchors)
    assert {"loss", "grad_norm", "slots_per_second", "val_tau/a"} <= run.data.metrics.keys()
    source = json.loads(run.inputs.dataset_inputs[0].dataset.source)["tags"]
    for table in ("selection", "traffic"):
        assert source[f"{table}_version"] == str(cfg.table(table).version())
    files = {file.path for file in MlflowClient(cfg.mlflow_uri).list_artifacts(run.info.run_id)}
    assert {"config.yaml", "training.svg"} <= files
    evaluation = evaluate.run(cfg)
    assert evaluation["drafter"] == trained["name"]
    few = evaluation["conversations"] < 5  # they carry no interval (docs/decisions/034)
    assert (evaluation["tau"]["ci"] is None) == few
    rows = cfg.table("acceptance").read().to_pylist()
    full = [row["accepted"] for row in rows if row["k"] == 4]
    assert tau(full) == pytest.approx(evaluation["tau"]["pooled"])
    assert {row["k"] for row in rows} == {1, 2, 3, 4}


@pytest.mark.usefixtures("one_process")
def test_training_on_captured_log_probabilities(work):
    """A divergence needs them; they lie beside the features, in a cache of their own."""
    divergence = ["train.loss=kl", "train.weights=dpace", "train.tv=0.5", "train.steps=3"]
    with pytest.raises(ValueError, match=r"harvest: \{top_k: 16\}"):
        train.run(configure(work, *divergence))
    with pytest.raises(ValueError, match=r"no features.*flywheel harvest"):
        train.run(configure(work, *divergence, "harvest.top_k=5"))
    cfg = configure(work, *divergence, "harvest.top_k=5")
    assert harvest.run(cfg)["reused"] == 0
    sample = first_sample(cfg)
    assert sample.top_ids is not None
    last = load_target(cfg.target_path, torch.float32).model(sample.ids[None]).logits[0, -2]
    assert torch.equal(last.topk(5).indices.int(), sample.top_ids[-1])
    assert train.run(cfg)["best_val_tau"] >= 1.0


@pytest.mark.usefixtures("one_process")
def test_random_blocks_train_under_dpace(work):
    cfg = configure(work, "train.random_block=true", "train.weights=dpace", "train.steps=6")
    whole = configure(work, "train.weights=dpace", "train.steps=6")
    plans = [train.plan(c)["plan"]["block_tokens_per_step"] for c in (cfg, whole)]
    assert 0.4 < plans[0] / plans[1] < 0.8, "blocks of 1 to 4 drafts"
    assert train.run(cfg)["best_val_tau"] >= 1.0


@pytest.mark.usefixtures("one_process")
def test_what_a_killed_driver_left_open_is_ended_and_told(work):
    """The export stands, but nobody has drawn its curves or ended its MLflow run."""
    cfg = configure(work, "train.steps=4", "train.seed=11")
    trained = train.run(cfg)
    tracker = Tracker.start(cfg, trained["name"], {})
    shutil.rmtree(cfg.path("mlartifacts", tracker.run_id))
    again = train.run(cfg)
    assert again["reused"]
    assert again["best_val_tau"] == trained["best_val_tau"]
    assert tracker.client.get_run(tracker.run_id).info.status == "FINISHED"
    names = [file.path for file in tracker.client.list_artifacts(tracker.run_id)]
    assert "training.svg" in names


@pytest.mark.usefixtures("one_process")
def test_a_run_continues_when_its_base_has_moved(work, tmp_path):
    words = ["train.steps=3", "train.seed=12"]
    base = make_base(configure(work), tmp_path / "base")
    trained = train.run(configure(work, *words, f"train.base={base}"))
    first = load_file(f"{trained['folder']}/model.safetensors")
    shutil.rmtree(trained["folder"])
    moved = configure(work, *words, f"train.base={base.rename(tmp_path / 'moved')}")
    again = train.run(moved)
    assert (again["name"], again["reused"]) == (trained["name"], False)
    second = load_file(f"{again['folder']}/model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    tracker = Tracker.start(moved, again["name"], {})
    tags = tracker.client.get_run(tracker.run_id).data.tags
    assert tags["execution.base"] == str(tmp_path / "moved")


@pytest.mark.usefixtures("one_process")
def test_a_group_that_was_killed_before_its_export_exports_when_ray_tries_again(work, monkeypatch):
    """The result stood already, so the group that Ray started again reported {} and left."""
    cfg = configure(work, "train.steps=3", "train.seed=13")
    trained = train.run(cfg)
    name = trained["name"]
    assert has_ended(cfg, name)
    first = load_file(f"{trained['folder']}/model.safetensors")
    shutil.rmtree(trained["folder"])
    assert read_result(cfg, name)
    assert not has_ended(cfg, name)
    assert is_unfinished(cfg, name)
    monkeypatch.setattr(train, "forget_result", lambda *run: None)  # as in Ray's next try
    again = train.run(cfg)
    assert (again["name"], again["best_val_tau"]) == (name, trained["best_val_tau"])
    second = load_file(f"{again['folder']}/model.safetensors")
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.usefixtures("one_process")
def test_a_largest_length_cuts_samples_and_is_another_run(work):
    cfg = configure(work, "train.steps=3")
    whole = training_set(cfg, live_pin(cfg), 4).lengths
    longest = sorted(whole)[len(whole) // 2]
    short = configure(work, "train.steps=3", f"train.max_length={longest}")
    plan = train.plan(short)["plan"]
    assert plan["samples_cut"] == sum(length > longest for length in whole) > 0
    assert plan["tokens"] == sum(min(length, longest) for length in whole)
    assert plan["name"] != train.plan(cfg)["plan"]["name"]
    assert train.run(short)["samples"] == len(whole)
    first = configure(work, "train.steps=3", "train.max_length=9")
    plan = train.plan(first)["plan"]
    assert plan["samples_without_anchor"] > 0, "a prompt of 8 leaves one token of the answer"
    trained = train.run(first)
    assert trained["samples_without_anchor"] == plan["samples_without_anchor"]
    assert trained["samples"] + plan["samples_without_anchor"] == len(whole)
    with pytest.raises(ValueError, match=r"in its first 2 tokens \(train.max_length\)"):
        train.run(configure(work, "train.max_length=2"))


ADAPTED = ["train.lora_rank=4", "train.optimizer=adamw", "train.lr=1e-2", "train.ema=0.9"]


@pytest.mark.parametrize("settings", [[], ADAPTED], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("one_process")
def test_zero_steps_export_the_base(work, tmp_path, settings, dtype):
    base = make_base(configure(work), tmp_path / "base", dtype)
    trained = train.run(configure(work, f"train.base={base}", "train.steps=0", *settings))
    for name in ("config.json", "model.safetensors"):
        assert (base / name).read_bytes() == (
            work / "drafters" / trained["name"] / name
        ).read_bytes()


@pytest.mark.usefixtures("one_process")
def test_a_head_on_a_plain_base_starts_as_the_base_and_is_evaluated(work, tmp_path):
    """No step: the body keeps every bit, and so does tau. Then the head alone learns."""
    plain = new_drafter(drafter_config(configure(work, "drafter.draft_vocab=0")), 7)
    base = save_drafter(plain, tmp_path / "base", torch.bfloat16)
    words = [f"train.base={base}", "drafter.head=dflash2"]
    start = train.run(configure(work, *words, "train.steps=0", "train.block_size=4"))
    body, whole = (load_file(Path(f) / "model.safetensors") for f in (base, start["folder"]))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in body.items())
    assert read_config(start["folder"]).block_size == 4
    again = train.run(configure(work, *words, "train.part=head", "train.max_slice_loss=1"))
    learned = load_file(Path(again["folder"]) / "model.safetensors")
    assert all(torch.equal(tensor, learned[name]) for name, tensor in body.items())
    [run] = MlflowClient(configure(work).mlflow_uri).search_runs(
        ["1"], f"tags.`flywheel.run` = '{again['name']}'"
    )
    assert {"val_recall", "val_oracle_tau", "val_tau"} <= run.data.metrics.keys()
    compared = [f"evaluate.drafter={start['folder']}", f"evaluate.baseline={base}"]
    found = evaluate.run(configure(work, *compared))
    shorter = evaluate.run(configure(work, f"evaluate.drafter={base}"))
    assert found["tau_by_k"] == {k: shorter["tau_by_k"][k] for k in found["tau_by_k"]}
    assert found["compat"]["selector_rank"] == 256


@pytest.mark.usefixtures("one_process")
def test_a_base_in_the_other_format_is_exported_in_ours(work, tmp_path):
    drafter = new_drafter(drafter_config(configure(work, "drafter.draft_vocab=0")), 3)
    base = save_drafter(drafter, tmp_path / "base", torch.bfloat16)
    convert_folder(base, tmp_path / "theirs", "speculators", work / "target", "org/target")
    words = ["train.steps=0", f"train.base={tmp_path / 'theirs'}"]
    trained = train.run(configure(work, *words))
    for name in ("config.json", "model.safetensors"):
        assert (base / name).read_bytes() == (
            work / "drafters" / trained["name"] / name
        ).read_bytes()


@pytest.mark.usefixtures("one_process")
def test_a_base_brings_its_mask_token(work, tmp_path):
    """So a target without a spare special token, here without any tokenizer, can be adapted to."""
    base = make_base(configure(work), tmp_path / "base")
    bare = configure(work, "drafter.mask_token_id=-1", "train.steps=0", f"train.base={base}")
    with pytest.raises((OSError, ValueError)):
        drafter_config(bare)
    folder = train.run(bare)["folder"]
    assert evaluate.run(bare.override("evaluate", drafter=folder))["drafter"] == Path(folder).name


def test_a_drafter_of_other_features_is_refused(work, tmp_path):
    cfg = configure(work, "drafter.taps=[1,2]")
    base = save_drafter(new_drafter(drafter_config(cfg), 7), tmp_path / "base", torch.bfloat16)
    with pytest.raises(ValueError, match=r"target_layer_ids \(1, 2\).*other features"):
        train.run(configure(work, f"train.base={base}"))
    with pytest.raises(ValueError, match=r"reads other target layers.*harvest drafter.taps=1,2"):
        evaluate.run(configure(work, f"evaluate.drafter={base}"))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_and_resumed_equals_uninterrupted(work):
    """SIGKILL of the whole process tree after the first checkpoint; the rerun continues."""
    settings = ["train.steps=40", "train.val_samples=1", "train.ema=0.9"]
    whole = train.run(configure(work, *settings, "train.seed=5"))
    other = work.with_name(work.name + "-killed")
    subprocess.run(["cp", "-r", str(work), str(other)], check=True)
    subprocess.run(["rm", "-rf", str(other / "drafters"), str(other / "runs")], check=True)
    words = [f"work={other}", *SETTINGS, *settings, "train.seed=5"]
    command = [sys.executable, "-m", "jobs.train", *words]
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    process = subprocess.Popen(command, start_new_session=True, env=env)
    while not list((other / "runs").glob("*/step-*.pt")):
        assert process.poll() is None, "training ended before it could be killed"
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not list((other / "drafters").glob("drafter-*")), "nothing may be exported yet"
    resumed = train.run(load(None, words))
    both = ([f"work={work}", *words[1:]], words)
    assert resumed["name"] == whole["name"]
    losses = [Tracker.start(load(None, w), whole["name"], {}).curve("loss") for w in both]
    assert losses[0] == losses[1], "no step before the kill is missing"
    first = load_file(f"{whole['folder']}/model.safetensors")
    second = load_file(f"{resumed['folder']}/model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
