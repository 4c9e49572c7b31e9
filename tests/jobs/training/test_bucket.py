"""Training with `work` in a bucket: the same run as on a disk, and other nodes continue it."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from jobs import train
from jobs.base.config import load
from jobs.training import loop
from jobs.training.states import find_states, read_result, states_folder
from store.place import Place, place_of
from tests.helpers.work import SETTINGS, configure

pytestmark = pytest.mark.timeout(600)
PRODUCTS = ("traffic", "selection", "feature_index", "features", "set_aside")
QUICK = ["train.steps=6", "train.checkpoint_every=3", "train.val_every=3", "train.val_samples=2"]


@pytest.fixture
def lake(bucket, harvested):
    """The URL of a work folder in a bucket, with what `harvested` has."""
    for name in PRODUCTS:
        if (harvested / name).is_dir():
            (place_of(bucket) / name).publish(harvested / name, last="")
    return bucket


def settings(lake, harvested, scratch, *more):
    """The settings of a node whose disk is `scratch`."""
    target = f"target.path={harvested / 'target'}"
    return [f"work={lake}", f"scratch={scratch}", target, *SETTINGS, *QUICK, *more]


def weights(cfg, summary):
    return load_file(cfg.place("drafters", summary["name"]).fetch(cfg.path("fetched")) / WEIGHTS)


WEIGHTS = "model.safetensors"


@pytest.mark.usefixtures("one_process")
def test_another_node_goes_on_from_the_state_in_the_bucket(lake, harvested, tmp_path, monkeypatch):
    """Its disk is empty. The weights are those of an undisturbed run on a local disk, bit for bit:
    of one process, in float32."""
    local = configure(shutil.copytree(harvested, tmp_path / "work"), *QUICK)
    undisturbed = train.run(local)
    first = load(None, settings(lake, harvested, tmp_path / "first"))
    real = loop.commit_state

    def then_stop(*args):
        real(*args)
        raise ValueError("this node is taken away")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "commit_state", then_stop)
        with pytest.raises(ValueError, match="is taken away"):
            train.run(first)
    name = undisturbed["name"]
    assert list(find_states(first, name)) == ["step-00000003.pt"]
    shutil.rmtree(first.path())
    second = load(None, settings(lake, harvested, tmp_path / "second"))
    planned = train.plan(second)["plan"]
    assert (planned["name"], planned["does"], planned["first_step"]) == (name, "resume", 3)
    assert not states_folder(second, name).exists(), "a plan fetches no state"
    resumed = train.run(second)
    assert (resumed["name"], resumed["folder"]) == (name, f"{lake}/drafters/{name}")
    assert read_result(second, name)["best_val_tau"] == undisturbed["best_val_tau"]
    found, expected = weights(second, resumed), weights(local, undisturbed)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    kept = ["step-00000003.pt", "step-00000006.pt"]
    assert list(find_states(second, name)) == kept
    third = load(None, settings(lake, harvested, tmp_path / "third"))
    assert train.run(third)["reused"]
    assert not states_folder(third, name).exists()


@pytest.mark.usefixtures("one_process")
def test_a_state_that_the_bucket_does_not_take_is_no_state(lake, harvested, tmp_path, monkeypatch):
    """Else this node would resume another state than the others."""
    cfg = load(None, settings(lake, harvested, tmp_path / "scratch"))
    real = Place.write

    def write(place, name, data):
        if name.startswith("step-"):
            raise OSError(f"{place}/{name}: the store does not answer")
        real(place, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(Place, "write", write)
        with pytest.raises(ValueError, match="does not answer"):
            train.run(cfg)
    assert not list(cfg.path("runs").glob("*/step-*"))
    assert train.run(cfg)["best_val_tau"] >= 1.0


@pytest.mark.long
@pytest.mark.slow
def test_two_workers_train_in_a_bucket(lake, harvested, tmp_path):
    words = settings(lake, harvested, tmp_path / "scratch", "train.workers=2", "ray.num_cpus=2")
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "jobs.train", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    cfg = load(None, words)
    summary = train.run(cfg)
    assert summary["reused"]
    local = configure(shutil.copytree(harvested, tmp_path / "work"), *QUICK)
    alone = train.run(local)
    found, expected = weights(cfg, summary), weights(local, alone)
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=0.02, atol=2e-3)
    assert len(list(cfg.path("training_data").glob("*.arrow"))) == 1
