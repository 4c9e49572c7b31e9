"""From the worker's file to the rounds of an answer."""

import json

import pytest

from serving.client import Completion
from serving.drafts import drafted, read_drafts


def completion(accepted, num_output):
    return Completion(
        request_id="cmpl-a",
        prompt_ids=[1, 2],
        output_ids=list(range(num_output)),
        text="",
        finish_reason="length",
        spec={"per_step_accepted": accepted, "per_step_drafted": [3] * len(accepted)},
        top_logprobs=[],
        started=0.0,
        seconds=0.0,
        decode_seconds=None,
    )


@pytest.fixture
def recorded(tmp_path):
    """Two requests in one batch. The prompt of `a` is computed in two chunks."""
    steps = [["cmpl-a-0-x", [n, n, n]] for n in range(6)]
    steps.insert(2, ["cmpl-ab-0-y", [9, 9, 9]])
    path = tmp_path / "drafts.jsonl"
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    return read_drafts(path)


def test_rounds_are_the_last_steps_but_one(recorded):
    # Steps 0 and 1 end the two chunks of the prompt. Step 1 drafts for round 1. Step 5's drafts
    # belong to no round.
    assert drafted(completion([0, 1, 2, 0], 8), recorded) == [[n, n, n] for n in (1, 2, 3, 4)]


def test_rounds_behind_the_end_are_cut_like_the_counts(recorded):
    # In the last round vLLM counted 3 drafts, but emitted one. Then a round more is counted.
    assert drafted(completion([0, 1, 3], 5), recorded) == [[2, 2, 2], [3, 3, 3], [4, 4, 4]]
    assert drafted(completion([0, 3, 3], 5), recorded) == [[2, 2, 2], [3, 3, 3]]


def test_an_answer_that_was_not_recorded_is_said(recorded):
    with pytest.raises(ValueError, match="6 steps were recorded for 6 rounds"):
        drafted(completion([0] * 6, 7), recorded)
    with pytest.raises(ValueError, match="0 steps were recorded"):
        drafted(completion([0], 2), {})
