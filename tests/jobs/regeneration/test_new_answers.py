"""What becomes of an answer: loops, samplers, labels."""

import pytest

from jobs.base.config import load
from jobs.regeneration.former_prompts import sampler_of
from jobs.regeneration.new_answers import without_loop

TEXT = list(range(100, 140))


@pytest.mark.parametrize(
    "loop",
    [[7], [7, 8], [7, 8, 9], [1, 2, 3, 4], [*range(10)], [*range(64)], [7, 7, 7, 8, 7, 7, 9]],
)
@pytest.mark.parametrize("more", [0, 1])
def test_a_loop_is_cut_after_its_first_pass(loop, more):
    times = 8 * max(1, -(-4 // len(loop)))  # where vLLM ends it: a pattern of at least 4 tokens
    whole = [*TEXT, *loop * times, *loop[: len(loop) * more // 2]]
    assert without_loop(whole) == [*TEXT, *loop]


def test_what_repeats_a_few_times_is_no_loop():
    whole = [*TEXT, *[7] * 20]
    assert without_loop(whole) == whole
    assert without_loop([*TEXT, *[1, 2, 3, 4, 5] * 7]) == [*TEXT, *[1, 2, 3, 4, 5] * 7]
    assert without_loop([7]) == [7]


def test_the_sampler_is_that_of_the_request():
    row = {"temperature": 0.7, "top_p": 0.9, "top_k": None, "seed": 3}
    kept = {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "seed": 3}
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None}
    cfg = load(None, [])
    assert sampler_of(cfg, row) == kept
    assert sampler_of(cfg, row | {"temperature": None}) == greedy, "what is not known is greedy"
    assert sampler_of(cfg.override("regenerate", sampler="greedy"), row) == greedy
