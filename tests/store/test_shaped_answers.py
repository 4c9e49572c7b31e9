"""Names of what shapes an answer: everything that moves a greedy choice, nothing that does not."""

import pytest

from store.shaped_answers import shaped_by

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
STRICT = {"type": "function", "function": {"name": "f", "strict": True}}


@pytest.mark.parametrize(
    "request_",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5},
        {"frequency_penalty": "0.5"},
        {"logit_bias": {"5": -100}},
        {"min_tokens": 4},
        {"bad_words": ["no"]},
        {"allowed_token_ids": [1, 2]},
        {"structured_outputs": {"regex": "a+"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "structural_tag"}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"use_beam_search": True},
        {"thinking_token_budget": 0},
        {"vllm_xargs": {"a": 1}},
        {"guided_json": {"type": "object"}},
    ],
)
def test_what_moves_a_greedy_choice_is_named(request_):
    assert shaped_by({"temperature": 0, **request_}, {}) == list(request_)


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"repetition_penalty": 1, "presence_penalty": "0.0", "frequency_penalty": None},
        {"logit_bias": {}, "bad_words": [], "min_tokens": 0, "thinking_token_budget": -1},
        {"min_p": 0.1, "top_p": 0.5, "top_k": 3},
        {"response_format": {"type": "text"}},
        {"tools": [TOOL]},
        {"tools": [STRICT], "tool_choice": "none"},
        {"ignore_eos": True, "stop": ["x"], "stop_token_ids": [3], "truncate_prompt_tokens": 5},
        {"n": 2, "seed": 1, "logprobs": True, "best_of": 2},
    ],
)
def test_what_keeps_the_greedy_choice_is_not_named(request_):
    assert shaped_by({"temperature": 0, **request_}, {}) == []


def test_the_servers_defaults_shape_where_the_request_is_silent():
    qwen = {"repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20}
    assert shaped_by({"temperature": 0}, qwen) == ["repetition_penalty"]
    assert shaped_by({"temperature": 0, "repetition_penalty": 1.0}, qwen) == []
    assert shaped_by({}, {"logits_processors": ["mine"]}) == ["logits_processors"]


def test_min_p_shapes_sampled_answers_alone():
    assert shaped_by({"min_p": 0.1, "temperature": "0"}, {}) == []
    assert shaped_by({"min_p": 0.1}, {"temperature": 0.0}) == []
    assert shaped_by({"min_p": 0.1}, {}) == ["min_p"]
    assert shaped_by({"min_p": 0.1, "temperature": 0.7}, {}) == ["min_p"]


@pytest.mark.parametrize(
    ("fields", "defaults"),
    [
        ({"tools": [TOOL, STRICT]}, {}),
        ({"tools": [TOOL], "parallel_tool_calls": False}, {}),
        ({"tools": [TOOL], "tool_choice": "auto"}, {"tool_strict": True}),
    ],
)
def test_a_grammar_of_tool_calls_is_named(fields, defaults):
    assert shaped_by(fields, defaults) == ["tools"]


@pytest.mark.parametrize(
    "request_", [{"tools": "x"}, {"tools": [1]}, {"tools": [{"function": 1}]}, {"tool_choice": 3}]
)
def test_damaged_fields_are_no_traceback(request_):
    assert shaped_by(request_, {}) == []
