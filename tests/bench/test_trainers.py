"""The task of bench/train.py on a tiny target: both trainers get the same anchors and slots."""

import json
from pathlib import Path

import pytest
import torch

from bench.trainers.ours import Trainer
from bench.trainers.task import last_states, write_task
from dflash.batches import Sample
from dflash.target_model import Target, backbone, load_target
from jobs.base.config import Config, load
from tests.helpers.tiny import SHAPE, make_target

STEPS = 3


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = make_target(tmp_path_factory.mktemp("target"))
    shape = ["drafter.mask_token_id=96", "drafter.taps=[1,2]", "drafter.block_size=5"]
    train = ["train.batch_size=3", "train.anchors=6", "target.dtype=float32"]
    return load(None, [f"target.path={folder}", *shape, *train])


@pytest.fixture(scope="module")
def target(cfg: Config) -> Target:
    return load_target(cfg.target_path, torch.float32)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Answers of 2 to 15 tokens after prompts of 4. Some blocks overrun the end of the answer, and
    some samples have too few anchors.
    """
    torch.manual_seed(0)
    found = []
    for i, length in enumerate((6, 9, 11, 19)):
        ids, mask = torch.randint(0, 90, (length,)), torch.arange(length) >= 4
        features = torch.randn(length, 2 * SHAPE["hidden_size"]).bfloat16()
        found.append(Sample(f"s{i}", "d", ids, mask, features))
    return found


@pytest.fixture(scope="module")
def task(
    cfg: Config, target: Target, samples: list[Sample], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("task")
    seen = torch.cat([s.ids[s.loss_mask] for s in samples]).unique()
    write_task(folder, cfg, samples, seen, last_states(target, samples), STEPS)
    return folder


def test_planned_anchors_supervise_the_slots_that_our_step_counts(task: Path, samples):
    """Like their code, this counts loss_mask over anchor + 1 .. anchor + 4 in one packed row."""
    trainer = Trainer(task, 97)
    for step, picks in enumerate(json.loads((task / "task.json").read_text())["plan"]):
        answer = trainer.step(step)
        row = torch.cat([samples[i].loss_mask for i, _ in picks] + [torch.zeros(5).bool()])
        starts = torch.tensor([0] + [len(samples[i].ids) for i, _ in picks]).cumsum(0)
        anchors = [int(starts[n]) + a for n, (_, chosen) in enumerate(picks) for a in chosen]
        assert answer["slots"] == sum(int(row[a + 1 : a + 5].sum()) for a in anchors) > 0


def test_a_step_learns_and_its_parts_make_up_its_seconds(task: Path):
    trainer = Trainer(task, 97)
    answers = [trainer.step(0) for _ in range(4)]
    assert answers[-1]["loss"] < answers[0]["loss"]
    for answer in answers:
        assert min(answer["split"].values()) >= 0
        assert sum(answer["split"].values()) == pytest.approx(answer["seconds"], rel=0.2)


def test_last_states_are_before_the_final_norm(target: Target, samples: list[Sample]):
    """Their trainer applies the norm itself; after it, the head gives the target's logits."""
    [last] = last_states(target, samples[-1:])
    with torch.inference_mode():
        logits = target.logits(backbone(target.model).norm(last.float()))
        wanted = target.model(samples[-1].ids[None]).logits[0]
    # bfloat16 states: a relative error of 2^-9 in each of 32 summands.
    torch.testing.assert_close(logits, wanted, atol=0.03 * float(wanted.abs().max()), rtol=0)
