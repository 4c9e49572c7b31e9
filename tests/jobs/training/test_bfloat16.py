"""Training where products are bfloat16: what stays float32, and that nothing else is different."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from dflash.checkpoint import load_drafter
from jobs import evaluate, train
from jobs.tracking.mlflow_runs import Tracker
from jobs.training.states import read_state, states_folder
from tests.helpers.work import configure, in_one_process, make_base

BF16 = [
    "target.dtype=bfloat16",
    "train.dtype=bfloat16",
    "train.steps=12",
    "train.checkpoint_every=6",
    "train.ema=0.9",
]
BF16 += ["train.val_every=6", "train.lr=2e-3", "train.seed=3", "evaluate.split=val"]


pytestmark = pytest.mark.timeout(600)
CURVE = 0.02


@pytest.fixture(scope="module")
def trained(work):
    """The run in bfloat16 on one worker, and its configuration."""
    cfg = configure(work, *BF16)
    with in_one_process():
        return cfg, train.run(cfg)


def losses(cfg, summary):
    return dict(Tracker.start(cfg, summary["name"], {}).curve("loss"))


def states(cfg, summary):
    """The two states that are kept."""
    return [read_state(p) for p in sorted(states_folder(cfg, summary["name"]).glob("step-*.pt"))]


def ones(weights):
    """Share of the norms' weights that are exactly 1.0."""
    norms = torch.cat([t.flatten() for name, t in weights.items() if "norm" in name])
    return float((norms == 1).double().mean())


def all_tensors(state):
    kept = [*state["drafter"].values(), *state["best_weights"].values()]
    kept += state["averaged"]["drafter"].values()
    return kept + [t for o in state["optimizers"] for s in o["state"].values() for t in s.values()]


def test_weights_average_and_optimizer_state_stay_float32(trained):
    """In bfloat16 a norm's weight of 1.0 does not move by less than 0.004: the sign of weights that
    are not float32 is a share of exact ones that training does not lower."""
    cfg, summary = trained
    for state in states(cfg, summary):
        tensors = all_tensors(state)
        assert {t.dtype for t in tensors if t.is_floating_point()} == {torch.float32}
        moments = {name for o in state["optimizers"] for s in o["state"].values() for name in s}
        assert {"momentum", "exp_avg", "exp_avg_sq"} <= moments
    last = states(cfg, summary)[-1]["drafter"]
    assert ones(last) < 0.01, "before the first step all are 1.0, but those of the final norm"
    rounded = {name: tensor.bfloat16() for name, tensor in last.items()}
    assert ones(rounded) > 0.2, "so in bfloat16 it would have shown"


@pytest.mark.usefixtures("one_process")
def test_a_resumed_run_is_the_same_run(trained, harvested, tmp_path):
    """Bit for bit, and its norms go on from where they were, not from 1.0."""
    cfg, summary = trained
    other = configure(shutil.copytree(harvested, tmp_path / "work"), *BF16)
    early = sorted(states_folder(cfg, summary["name"]).glob("step-*.pt"))[0]
    states_folder(other, summary["name"]).mkdir(parents=True)
    shutil.copy(early, states_folder(other, summary["name"]))
    again = train.run(other)
    assert again["name"] == summary["name"]
    assert min(losses(other, again)) == 7, "it went on"
    first, second = (load_file(f"{s['folder']}/model.safetensors") for s in (summary, again))
    assert all(torch.equal(first[name], second[name]) for name in first)
    before, after = (states(c, s)[-1]["drafter"] for c, s in ((cfg, summary), (other, again)))
    assert ones(after) == ones(before)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.usefixtures("one_process")
def test_the_curve_is_that_of_float32(trained, work):
    cfg, summary = trained
    wide = configure(work, *BF16, "target.dtype=float32", "train.dtype=float32")
    expected, found = losses(wide, train.run(wide)), losses(cfg, summary)
    assert sorted(found) == sorted(expected)
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step], rel=CURVE)


def test_the_tau_of_validation_is_the_tau_of_what_is_exported(trained):
    """Weights are validated as an export rounds them, in the dtype that `evaluate` replays in."""
    cfg, summary = trained
    evaluation = evaluate.run(cfg.override("evaluate", drafter=summary["folder"]))
    assert evaluation["tau"]["pooled"] == summary["best_val_tau"]


@pytest.mark.long
@pytest.mark.slow
def test_two_sharded_workers_give_the_run_of_one(trained, harvested, tmp_path):
    cfg, summary = trained
    folder = shutil.copytree(harvested, tmp_path / "work")
    two = configure(folder, *BF16, "train.workers=2", "train.shard=fsdp")
    both = train.run(two)
    found, expected = losses(two, both), losses(cfg, summary)
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step], rel=CURVE)
    one, other = (load_drafter(s["folder"]).state_dict() for s in (summary, both))
    for name, tensor in other.items():
        torch.testing.assert_close(tensor, one[name], rtol=0.02, atol=4e-3)


ADAPTED = ["train.lora_rank=4", "train.optimizer=adamw", "train.lr=1e-2"]


@pytest.mark.parametrize("settings", [[], ADAPTED], ids=["full", "lora"])
@pytest.mark.usefixtures("one_process")
def test_zero_steps_export_the_base(work, tmp_path, settings):
    base = make_base(configure(work), tmp_path / "base", torch.bfloat16)
    words = [*BF16, f"train.base={base}", "train.steps=0", *settings]
    zero = train.run(configure(work, *words))
    for name in ("config.json", "model.safetensors"):
        assert (base / name).read_bytes() == (work / "drafters" / zero["name"] / name).read_bytes()


@pytest.mark.usefixtures("one_process")
def test_factors_train_over_a_frozen_base(work, tmp_path):
    """The base's own weights never move; the factors do, in float32."""
    base = make_base(configure(work), tmp_path / "base", torch.bfloat16)
    cfg = configure(work, *BF16, f"train.base={base}", *ADAPTED)
    summary = train.run(cfg)
    last = states(cfg, summary)[-1]["drafter"]
    frozen = load_drafter(base).state_dict()
    assert all(torch.equal(last[name], tensor) for name, tensor in frozen.items())
    factors = [t for name, t in last.items() if name.endswith("lora_b")]
    assert all(t.dtype == torch.float32 and t.abs().max() > 0 for t in factors)
