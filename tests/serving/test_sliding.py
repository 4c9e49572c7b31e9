"""Sliding-window drafters in a real vLLM, one of them of a reduced vocabulary: served
rounds equal replayed ones.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash.batches import Sample
from dflash.checkpoint import load_drafter, save_drafter
from dflash.decode import decode
from dflash.drafter_config import DrafterConfig
from dflash.frozen_head import Candidates
from dflash.losses import choose_weights, recorded_token
from dflash.model import drafter_of, new_drafter, reshaped
from dflash.optim import build_optimizers
from dflash.replay import Request as Recorded
from dflash.replay import replay
from dflash.target_model import load_target
from dflash.training_step import generator, step_batch, step_indices, step_loss
from dflash.vocabulary import frequent_tokens, set_vocabulary
from serving.client import Request, complete
from serving.vllm_counts import rounds
from serving.vllm_server import Server
from tests.serving.conftest import TAPS, VOCABULARY

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PROMPTS = [[0, 5 + i, 9, 20 + i, *range(40, 50 + i)] for i in range(8)]
ANSWER = 48


@pytest.fixture(scope="module")
def target(tiny_target):
    return load_target(tiny_target, torch.float32)


@pytest.fixture(scope="module")
def samples(target):
    found = []
    for i, prompt in enumerate(PROMPTS):
        ids = [*prompt, *decode(target, prompt, ANSWER).output_ids]
        features = target.features([ids], TAPS)[0].taps.clone()
        mask = torch.arange(len(ids)) >= len(prompt)
        found.append(Sample(f"s{i}", "d", torch.tensor(ids), mask, features))
    return found


def trained(target, samples, causal, vocabulary):
    """A drafter with window 6 that knows these answers a little: about one draft is accepted per
    round.
    """
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
    }
    cfg = DrafterConfig(
        **shape,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        block_size=4,
        num_target_layers=6,
        target_layer_ids=TAPS,
        mask_token_id=3,
        sliding_window=6,
        is_causal=causal,
        draft_vocab_size=vocabulary,
    )
    drafter = new_drafter(cfg, seed=0)
    [optimizer] = build_optimizers(drafter, "adamw", 5e-3, torch.float32)
    candidates, weigh = (
        Candidates(torch.arange(VOCABULARY), VOCABULARY, 0),
        choose_weights("dpace", 0),
    )
    borrowed = (target.embedding, target.head)
    for step in range(25):
        batch = step_batch(samples, step_indices(step, 8, 8, 0), 47, 3, recorded_token, 0)
        out = step_loss(drafter, batch, *borrowed, candidates, generator(step), weigh)
        (out.loss / out.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    if vocabulary:
        answers = (sample.ids[sample.loss_mask] for sample in samples)
        set_vocabulary(drafter, target.head, frequent_tokens(answers, vocabulary, VOCABULARY))
    return drafter


@pytest.mark.parametrize(
    ("causal", "vocabulary"), [(False, 40), (True, 0)], ids=["bidirectional-reduced", "causal"]
)
def test_served_rounds_are_the_replayed_ones(
    tiny_target, target, samples, tmp_path, causal, vocabulary
):
    drafter = trained(target, samples, causal, vocabulary)
    folder = save_drafter(drafter, tmp_path / "drafter", torch.float32)
    requests = [
        Request(prompt=p, max_tokens=ANSWER, temperature=0.0, extra={"ignore_eos": True})
        for p in PROMPTS
    ]
    small: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_gib": 1}
    with Server(tiny_target, drafter=folder, log=tmp_path / "serve.log", **small) as server:
        answers = complete(server.url, requests, 8)
    recorded = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = [*prompt, *answer.output_ids]
        features = target.features([ids], TAPS)[0].taps
        recorded.append(Recorded(torch.tensor(ids), len(prompt), features))
    drafter = load_drafter(folder)
    replayed = replay(drafter, target.embedding, target.head, recorded, 3)
    assert [rounds(answer)[0] for answer in answers] == replayed
    # The comparison can fail: a window of one more or less gives other rounds, and so on.
    changes = [{"sliding_window": window} for window in (0, 5, 7)]
    others = [
        drafter_of(replace(drafter.cfg, **change), drafter.state_dict())
        for change in [*changes, {"is_causal": not causal}]
    ]
    whole = reshaped(drafter, replace(drafter.cfg, draft_vocab_size=0), seed=0)
    for other in [*others, *([whole] if vocabulary else [])]:
        assert replay(other, target.embedding, target.head, recorded, 3) != replayed
