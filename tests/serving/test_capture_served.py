"""The capture inside a real vLLM server: the same answers, and every request accounted for."""

import json
import shutil
import time
from typing import Any

import httpx
import pytest

from dflash.checkpoint import drafter_sha256
from serving.vllm_server import Server
from tests.helpers.tiny import add_tokenizer

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "w5 w9 w20"}, {"role": "assistant", "content": "w7"}]
TWO = {"n": 2, "temperature": 0.8, "seed": 3}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
EACH = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
SHAPES: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "w5 w9 w20"}),
    (TEXT, {"prompt": [5, 9, 20], "return_token_ids": False}),
    (TEXT, {"prompt": ["w5 w9", "w20 w21 w22"], "logprobs": 2}),
    (TEXT, {"prompt": ["w5 w9", "w20 w21 w22"], **USAGE, **TWO}),
    (TEXT, {"prompt": "w5", **TWO}),
    (TEXT, {"prompt": "w5", "stream": True, "logprobs": 1}),
    (TEXT, {"prompt": "w5", **EACH}),
    (TEXT, {"prompt": "w5 w9", "echo": True}),
    (TEXT, {"prompt": "w5 w9", "echo": True, "stream": True}),
    (TEXT, {"prompt": [5, 9], "echo": True, "logprobs": 1}),
    (TEXT, {"prompt": "w5 w9", "temperature": "0", "top_k": 5.0}),
    (CHAT, {"messages": MESSAGES[:1]}),
    (CHAT, {"messages": MESSAGES[:1], "logprobs": True, "top_logprobs": 2, **TWO}),
    (CHAT, {"messages": MESSAGES[:1], **USAGE}),
    (CHAT, {"messages": MESSAGES[:1], **EACH, **TWO}),
    (CHAT, {"messages": MESSAGES, "echo": True, "add_generation_prompt": False}),
    (CHAT, {"messages": MESSAGES[:1], "presence_penalty": 0.5, "max_tokens": "4"}),
]
ADDED = ("prompt_token_ids", "token_ids")
OF_THE_MOMENT = ("id", "created", "metrics")


ARGS = ("--root-path", "/llm", "--override-generation-config", '{"repetition_penalty": 1.2}')
SMALL: dict[str, Any] = {"k": (3,), "max_model_len": 128, "max_num_seqs": 8, "kv_cache_gib": 1}


@pytest.fixture(scope="module")
def target(tiny_target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(tiny_target, folder / "target")
    add_tokenizer(folder / "target", 128, TEMPLATE)
    return folder / "target"


@pytest.fixture(scope="module")
def server(target, tiny_drafter):
    """A server with capture, under a proxy's path prefix; the model's defaults have a penalty."""
    args = (*ARGS, "--middleware", "tests.helpers.feed_endpoint.FeedEndpoint")
    with Server(
        target, drafter=tiny_drafter, drafter_version="v1", replica="here", args=args,
        capture=target.parent / "capture", log=target.parent / "log", **SMALL,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def bare(target, tiny_drafter):
    """The same server without any of our middleware."""
    with Server(
        target, drafter=tiny_drafter, watch=False, args=ARGS, log=target.parent / "bare", **SMALL
    ) as running:
        yield running


def post(server, path, body, headers=()):
    """The answer as a list of its parts: the events of a stream, or the whole."""
    body = {"model": "target", "max_tokens": 6, "temperature": 0, **body}
    response = httpx.post(server.url + path, json=body, headers=list(headers), timeout=300)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return [response.json()]
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def without_ids(parts):
    """What a client sees of an answer besides ids; the tokens of an event depend on the moment."""
    parts = json.loads(json.dumps(parts))
    texts: dict[int, list[Any]] = {}
    for part in parts:
        for name in (*ADDED, *OF_THE_MOMENT):
            part.pop(name, None)
        for choice in part["choices"]:
            for name in ADDED:
                choice.pop(name, None)
            if len(parts) > 1:
                seen = texts.setdefault(choice["index"], ["", [], []])
                seen[0] += choice.get("text") or choice.get("delta", {}).get("content") or ""
                seen[1] += (choice.get("logprobs") or {}).get("tokens", [])
                seen[2] += [choice[n] for n in ("finish_reason", "stop_reason") if choice.get(n)]
    return parts if len(parts) == 1 else (texts, parts[-1].get("usage"))


@pytest.mark.parametrize(("path", "body"), SHAPES, ids=lambda value: str(value)[:60])
def test_an_answer_with_capture_is_the_one_without_but_for_the_ids(server, bare, path, body):
    expected = post(bare, path, body)
    watched = post(server, path, body, [("X-Flywheel-Consent", "false")])
    captured = post(server, path, body, [("X-Flywheel-Conversation", "same")])
    # With a drafter, sampled tokens depend on the moment: the rounds draw from the same seed.
    seen = form if "seed" in body else without_ids
    assert seen(captured) == seen(watched) == seen(expected)


def form(parts):
    """What does not depend on the tokens: choices, how they ended, and usage."""
    choices = [choice for part in parts for choice in part["choices"]]
    ends = {(c["index"], c["finish_reason"]) for c in choices if c["finish_reason"]}
    return ends, parts[-1].get("usage"), {name for part in parts for name in part} - {*ADDED}


def feed(server, after=0):
    return httpx.get(f"{server.url}/test/acceptance?{after}").json()


@pytest.mark.parametrize(
    ("path", "body"),
    [shape for shape in SHAPES if "echo" not in shape[1]],
    ids=lambda value: str(value)[:60],
)
def test_rounds_of_every_choice_are_recorded_whatever_the_client_asked_for(
    server, tiny_drafter, path, body
):
    before, old = feed(server)["next"], len(rows(server))
    asked = [("X-Flywheel-Conversation", "c1"), ("X-Flywheel-Tenant", "t")]
    post(server, path, {**body, "max_tokens": 12}, asked)
    several = isinstance(body.get("prompt"), list) and isinstance(body["prompt"][0], str)
    choices = body.get("n", 1) * (len(body["prompt"]) if several else 1)
    records = rows(server, old + choices)[old:]
    assert len(records) == choices
    for row in records:
        assert row["drafter_sha256"] == drafter_sha256(tiny_drafter)
        assert (row["drafter"], row["replica"], row["k"]) == ("v1", "here", 3)
        assert sum(a + 1 for a in row["accepted"]) == len(row["output_ids"]) - 1 > 0
        pairs = zip(row["accepted"], row["drafted"], strict=True)
        assert all(0 <= accepted <= drafted <= 3 for accepted, drafted in pairs)
        assert any(row["drafted"])
        assert 0 < row["first_token_seconds"] < row["finished_at"] - row["started_at"]
        assert row["concurrency"] == 1
    found = feed(server, before)["rows"]
    same = ("accepted", "drafted", "drafter_sha256", "started_at", "conversation_id", "tenant")
    assert [[r[n] for n in same] for r in found] == [[r[n] for n in same] for r in records]
    assert found[0]["request_id"] == records[0]["request_id"]
    assert [row["output_tokens"] for row in found] == [len(row["output_ids"]) for row in records]


def test_what_gives_no_rounds_is_counted(server):
    """One token, a stop string, a client that goes away, no consent, and a mistake."""
    before, old = feed(server), len(rows(server))
    told = counts(server)
    post(server, TEXT, {"prompt": "w5", "max_tokens": 1})
    [whole] = post(server, TEXT, {"prompt": "w5", "max_tokens": 8})
    word = whole["choices"][0]["text"].split()[3]
    post(server, TEXT, {"prompt": "w5", "max_tokens": 8, "stop": [word]})
    post(server, CHAT, {"messages": MESSAGES[:1]}, [("X-Flywheel-Consent", "no")])
    assert httpx.post(server.url + TEXT, json={"model": "other", "prompt": "w5"}).is_error
    long = {"model": "target", "prompt": "w5", "max_tokens": 120, "stream": True}
    with httpx.stream("POST", server.url + TEXT, json=long | {"ignore_eos": True}) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 30
    while counts(server).get("aborted") == told.get("aborted") and time.monotonic() < deadline:
        time.sleep(0.1)
    now = counts(server)
    differences = {name: now[name] - told.get(name, 0) for name in now}
    assert differences == differences | {"finished": 3, "uncounted": 1, "aborted": 1}
    found = feed(server, before["next"])
    assert (found["requests"] - before["requests"], found["failed"]) == (5, 0)
    one, full, stopped, unnamed = found["rows"]
    assert (one["accepted"], one["output_tokens"], one["k"]) == ([], 1, 3)
    assert sum(n + 1 for n in full["accepted"]) == 7
    assert (stopped["accepted"], stopped["finish_reason"]) == ([], "stop")
    assert [unnamed[n] for n in ("request_id", "domain", "conversation_id")] == ["", None, None]
    assert unnamed["accepted"]
    records = rows(server, old + 4)[old:]
    assert [row["accepted"] is None for row in records] == [False, False, True, True]
    assert records[3]["finish_reason"] == "abort"


def counts(server):
    """Requests by outcome, of /metrics."""
    found = {}
    for line in httpx.get(server.url + "/metrics").text.splitlines():
        if line.startswith("flywheel_requests_total{"):
            name, count = line.split('outcome="')[1].split('"} ')
            assert 'drafter="v1/' in line
            found[name] = float(count)
    return found


def test_metrics_have_the_rounds_of_the_feed(server):
    post(server, TEXT, {"prompt": "w5 w6 w7", "max_tokens": 20, "ignore_eos": True})
    answer = feed(server)
    assert answer["lost"] == 0
    rounds = [row for row in answer["rows"] if row["accepted"]]
    for name, column in (("offered", "drafted"), ("accepted", "accepted")):
        for position in (1, 2, 3):
            expected = sum(n >= position for row in rounds for n in row[column])
            found = counter(server.url, f"flywheel_drafts_{name}_total", f'position="{position}"')
            assert found == expected, (name, position)
    assert counter(server.url, "flywheel_rounds_total") == sum(len(r["accepted"]) for r in rounds)


def counter(url, name, label=""):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(name + "{") and label in line]
    return sum(float(line.split()[-1]) for line in found)


def rows(server, least=0):
    """All records; a thread writes them, so `least` of them are waited for."""
    deadline = time.monotonic() + 30
    while True:
        lines = [x for path in server.capture.glob("*.jsonl") for x in path.read_text().split("\n")]
        found = [json.loads(line) for line in lines[:-1]]
        if len(found) >= least or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def outcomes(server):
    found = {}
    for line in httpx.get(server.url + "/metrics").text.splitlines():
        if line.startswith("flywheel_capture_total{"):
            name, count = line.removeprefix('flywheel_capture_total{outcome="').split('"} ')
            found[name] = float(count)
    return found


def test_every_request_to_a_real_server_is_accounted_for(server):
    before, old = outcomes(server), len(rows(server))
    domain = [("X-Flywheel-Domain", "büro".encode())]
    post(server, "/llm" + CHAT, {"messages": MESSAGES[:1]}, domain)
    post(server, CHAT, {"messages": MESSAGES[:1], "repetition_penalty": 1.0, "min_tokens": 2})
    post(server, TEXT, {"prompt": ["w5", "w6"], **TWO, **USAGE, "repetition_penalty": "1.0"})
    post(server, TEXT, {"prompt": "w5", "echo": True})
    post(server, TEXT, {"prompt": "w5"}, [("X-Flywheel-Consent", "true, off")])
    responses = {"model": "target", "input": "w5 w6", "max_output_tokens": 4}
    assert httpx.post(server.url + "/llm/v1/responses", json=responses).status_code == 200
    assert httpx.post(server.url + TEXT, json={"model": "other", "prompt": "w5"}).is_error
    new = rows(server, old + 6)[old:]
    after = outcomes(server)
    counted = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert counted == {"written": 6, "not_captured": 2, "no_consent": 1, "not_ok": 1}
    assert [row["shaped"] for row in new] == [["repetition_penalty"], ["min_tokens"], *4 * [[]]]
    assert [row["choice"] for row in new] == [0, 0, 0, 1, 2, 3]
    assert [row["endpoint"] for row in new] == [CHAT, CHAT, *4 * [TEXT]]
    assert new[0]["domain"] == "büro"
    assert {row["temperature"] for row in new[2:]} == {0.8}
    assert all(row["prompt_ids"] and row["output_ids"] for row in new)


PLAIN = """
    messages model logprobs top_logprobs max_tokens max_completion_tokens n seed stop stream
    stream_options top_p tools parallel_tool_calls reasoning_effort include_reasoning user top_k
    length_penalty stop_token_ids include_stop_str_in_output ignore_eos skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
    logprob_token_ids echo add_generation_prompt continue_final_message add_special_tokens documents
    chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs priority request_id
    session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
    return_token_offsets return_prompt_text mm_payload return_mm_kwargs cache_salt
    kv_transfer_params ec_transfer_params repetition_detection stream_interval prompt suffix
    prompt_embeds watermarking
"""
"""Fields that change no greedy choice, or make no plain request; store/shaped_answers.py says
why."""


def test_every_field_of_vllms_requests_was_looked_at():
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    from store.shaped_answers import FIELDS

    fields = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    assert fields - set(FIELDS) <= set(PLAIN.split())


def test_every_content_part_of_vllm_was_looked_at():
    from vllm.renderers.chat_utils import MM_PARSER_MAP

    from serving.capture_request import NOT_TEXT

    text = {"text", "thinking", "input_text", "output_text", "refusal", "tool_reference"}
    assert set(MM_PARSER_MAP) == text | set(NOT_TEXT)
