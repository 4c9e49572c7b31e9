"""Who wrote an answer: near ties are no evidence, and another model's text is recognised."""

import pytest
import torch

from dflash.agreement import evidence, tie_bound
from dflash.decode import decode
from dflash.sampling import Sampling
from dflash.target_model import load_target
from tests.helpers.tiny import greedy_answers, make_target

DTYPES = [torch.float32, torch.bfloat16]
NUM, PROMPT, LENGTH = 200, 6, 20


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def written(request, tmp_path_factory):
    """(target, [prompt + answer of the target], [the same prompts answered by another one])."""
    folder = tmp_path_factory.mktemp("targets")
    target = load_target(make_target(folder / "own"), request.param)
    other = load_target(make_target(folder / "other", "qwen3"), request.param)
    drawn = torch.Generator().manual_seed(3)
    prompts = torch.randint(1, 90, (NUM, PROMPT), generator=drawn).tolist()
    texts = [
        [[*p, *a] for p, a in zip(prompts, greedy_answers(model, prompts, LENGTH), strict=True)]
        for model in (target, other)
    ]
    return target, *texts


def judged(target, rows, length=LENGTH, temperature=0.0):
    rows = [row[: PROMPT + length] for row in rows]
    for row, features in zip(rows, target.features(rows, [1]), strict=True):
        last, recorded = features.last[PROMPT - 1 : -1], torch.tensor(row[PROMPT:])
        yield evidence(last, target.head, recorded, temperature)


@pytest.mark.parametrize("length", [1, 2, 5, 9, LENGTH])
def test_near_ties_never_speak_against_the_target(written, length):
    """In an answer of 9 tokens or fewer, one tie was once enough to reject it."""
    target, own, _ = written
    found = list(judged(target, own, length))
    assert all(one.ok for one in found)
    assert all(one.positions == length for one in found)
    assert sum(one.largest_gap > 0 for one in found) < NUM / 2


@pytest.mark.parametrize(("length", "share"), [(2, 0.9), (5, 0.98), (LENGTH, 1.0)])
def test_another_models_answer_is_seen(written, length, share):
    """Not all short ones: two tokens of another model may be the target's choice, too."""
    target, _, others = written
    found = list(judged(target, others, length))
    assert sum(not one.ok for one in found) >= share * NUM


def test_one_wrong_token_in_a_long_answer_is_no_evidence(written):
    target, own, _ = written
    row = list(own[0])
    worst = target.features([row], [1])[0].last[-2] @ target.head.T
    row[-1] = int(worst.argmin())
    [found] = judged(target, [row])
    assert found.ok
    assert found.wrong == 1
    assert found.largest_gap > tie_bound(torch.bfloat16, float(worst.abs().max()))


@pytest.mark.parametrize(("temperature", "share"), [(0.2, 0.98), (0.7, 0.95), (1.0, 0.5)])
def test_sampled_answers_are_told_apart_by_their_odds(written, temperature, share):
    """At temperature 1 this model is nearly uniform, so 20 tokens identify only half of them."""
    target, _, others = written
    own = []
    for seed, row in enumerate(others[:12]):
        sampling = Sampling(temperature=temperature, top_p=(1.0, 0.9)[seed % 2])
        prompt = row[:PROMPT]
        own.append(
            [*prompt, *decode(target, prompt, LENGTH, sampling=sampling, seed=seed).output_ids]
        )
    assert all(one.ok for one in judged(target, own, temperature=temperature))
    strangers = list(judged(target, others, temperature=temperature))
    assert sum(not one.ok for one in strangers) >= share * NUM


def test_a_bound_grows_with_the_logits():
    assert tie_bound(torch.bfloat16, 64.0) == 2 * tie_bound(torch.bfloat16)
    assert tie_bound(torch.float32) < tie_bound(torch.float16) < tie_bound(torch.bfloat16)


def test_nan_is_no_evidence_for_the_target():
    last, head = torch.full((3, 4), float("nan")), torch.randn(9, 4)
    for temperature in (0.0, 1.0):
        assert not evidence(last, head, torch.tensor([1, 2, 3]), temperature).ok
