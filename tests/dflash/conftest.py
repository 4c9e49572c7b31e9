"""Tiny random targets and a drafter trained on one of them, in seconds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from dflash.batches import Sample
from dflash.decode import decode
from dflash.drafter_config import DrafterConfig
from dflash.frozen_head import Candidates
from dflash.losses import choose_labels, choose_weights
from dflash.model import Drafter, new_drafter
from dflash.optim import build_optimizers
from dflash.target_model import Target, load_target
from dflash.training_step import generator, step_batch, step_indices, step_loss
from tests.helpers.tiny import make_target

PAIRS = ("llama-float32", "qwen3-bfloat16")
"""Kinds of targets and dtypes are independent: two of the four pairs show both."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test of a target runs with these pairs, or with the PAIRS of its module.

    A module cannot override the fixtures below instead: the ones that depend on them are cached for
    the whole session.
    """
    if "pair" in metafunc.fixturenames:
        pairs = getattr(metafunc.module, "PAIRS", PAIRS)
        metafunc.parametrize("pair", pairs, indirect=True, scope="session")


@pytest.fixture(scope="session")
def pair(request: pytest.FixtureRequest) -> str:
    return request.param


Made = TypeVar("Made")
_MADE: dict[tuple[str, str], Any] = {}


def of_pair(pair: str, name: str, make: Callable[[], Made]) -> Made:
    """What `make` gives for this pair, made once: pytest ends a fixture when its parameter changes,
    and that is twice in every file.
    """
    if (pair, name) not in _MADE:
        _MADE[pair, name] = make()
    return _MADE[pair, name]


@pytest.fixture(scope="session")
def target_folder(pair: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = pair.partition("-")[0]
    return of_pair(pair, "folder", lambda: make_target(tmp_path_factory.mktemp(kind), kind))


@pytest.fixture(scope="session")
def dtype(pair: str) -> torch.dtype:
    return getattr(torch, pair.partition("-")[2])


@pytest.fixture(scope="session")
def target(pair: str, target_folder: Path, dtype: torch.dtype) -> Target:
    return of_pair(pair, "target", lambda: load_target(target_folder, dtype))


@pytest.fixture(scope="session")
def config() -> DrafterConfig:
    return DrafterConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=97,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        block_size=6,
        num_target_layers=6,
        target_layer_ids=(1, 2, 4),
        mask_token_id=96,
    )


@pytest.fixture(scope="session")
def drafter(config: DrafterConfig, dtype: torch.dtype) -> Drafter:
    return new_drafter(config, seed=0).to(dtype)


@pytest.fixture(scope="session")
def samples(pair: str, target: Target, config: DrafterConfig) -> list[Sample]:
    """Greedy answers of the target to random prompts, with its features."""
    return of_pair(pair, "samples", lambda: make_samples(target, config))


def make_samples(target: Target, config: DrafterConfig) -> list[Sample]:
    found = []
    for i in range(12):
        prompt = torch.randint(0, 90, (5 + i,), generator=generator("prompt", i)).tolist()
        ids = [*prompt, *decode(target, prompt, max_tokens=40).output_ids]
        features = target.features([ids], config.target_layer_ids)[0].taps.clone()
        mask = torch.arange(len(ids)) >= len(prompt)
        found.append(Sample(f"s{i}", "d", torch.tensor(ids), mask, features))
    return found


@pytest.fixture(scope="session")
def trained(pair: str, samples: list[Sample], target: Target, config: DrafterConfig) -> Drafter:
    """A drafter that has learned some of its training answers, its float32 weights rounded as an
    export rounds them: tau well above 1 and below B."""
    return of_pair(pair, "trained", lambda: train(samples, target, config))


def train(samples: list[Sample], target: Target, config: DrafterConfig) -> Drafter:
    drafter = new_drafter(config, seed=0)
    optimizers = build_optimizers(drafter, "adamw", 5e-3, torch.float32)
    candidates = Candidates(torch.arange(97), 97, 0)
    labels, weigh = choose_labels("ce", 97), choose_weights("decay", 4.0)
    for step in range(60):
        batch = step_batch(samples, step_indices(step, 12, 4, 0), 12, 5, labels, 0)
        draw = generator("c", step)
        out = step_loss(drafter, batch, target.embedding, target.head, candidates, draw, weigh)
        (out.loss / out.weight).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return drafter.to(target.dtype)
