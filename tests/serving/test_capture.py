"""Capture around a bare ASGI app that answers like vLLM."""

import asyncio
import json
from itertools import pairwise
from types import SimpleNamespace

import pytest

from serving import capture, capture_request, capture_writer, loaded
from serving.loaded import Loaded

PROMPT = [1, 5, 6]
SHA = "0123456789ab" * 5 + "cdef"
ASK = {"model": "m", "messages": [{"role": "user", "content": "secret"}]}
CHAT = {
    "id": "chatcmpl-1",
    "prompt_token_ids": PROMPT,
    "choices": [
        {"index": 0, "finish_reason": "stop", "stop_reason": None, "token_ids": [7, 8, 2]},
        {"index": 1, "finish_reason": "length", "stop_reason": None, "token_ids": [9]},
    ],
    "metrics": {"speculative_decoding": {"per_step_accepted": [1]}},
}


def _event(data):
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _delta(ids, reason=None):
    return {"index": 0, "finish_reason": reason, "token_ids": ids, "delta": {"content": "x"}}


STREAM = [
    _event({"id": "c", "prompt_token_ids": PROMPT, "choices": [{"index": 0, "delta": {}}]}),
    _event({"id": "c", "choices": [_delta([7])]}),
    _event({"id": "c", "choices": [_delta([8, 2], "stop")]}),
    _event({"id": "c", "choices": [], "metrics": {"speculative_decoding": {"num_spec_steps": 1}}}),
    b"data: [DONE]\n\n",
]


class FakeServer:
    """Sends `parts` and remembers what it was asked; stops after `fail_after` parts if given."""

    def __init__(self, parts, status=200, fail_after=None):
        self.parts, self.status, self.fail_after = parts, status, fail_after
        self.request, self.length = None, None

    async def __call__(self, scope, receive, send):
        message = await receive()
        self.request = json.loads(message["body"]) if message["body"] else None
        self.length = int(dict(scope["headers"])[b"content-length"])
        assert self.length == len(message["body"])
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        for index, part in enumerate(self.parts):
            if index == self.fail_after:
                raise asyncio.CancelledError
            more = index + 1 < len(self.parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})


def exchange(
    app, request, *, path="/v1/chat/completions", headers=(), parts=1, root="", server=None
):
    """One request through `app`, its body in `parts` messages; the response messages."""
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    cuts = [len(body) * i // parts for i in range(parts + 1)]
    waiting = [
        {"type": "http.request", "body": body[a:b], "more_body": b < len(body)}
        for a, b in pairwise(cuts)
    ]
    sent = []

    async def receive():
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    raw = [(b"content-length", str(len(body)).encode())]
    raw += [(n.lower().encode(), v if isinstance(v, bytes) else v.encode()) for n, v in headers]
    scope = {"type": "http", "method": "POST", "path": path, "headers": raw}
    scope |= {"root_path": root, "app": server}
    asyncio.run(app(scope, receive, send))
    return sent


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYWHEEL_CAPTURE_DIR", str(tmp_path))
    monkeypatch.setattr(loaded, "_current", Loaded("v7", SHA))
    return capture.Capture


def lines(middleware):
    """Everything captured; closes the writer."""
    middleware.writer.close()
    path = middleware.writer.path
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def outcomes():
    samples = [s for metric in capture._outcomes.collect() for s in metric.samples]
    return {s.labels["outcome"]: s.value for s in samples if s.name.endswith("_total")}


@pytest.fixture
def counted():
    """What was counted since the test began, without the zeros."""
    before = outcomes()
    return lambda: {k: n - before[k] for k, n in outcomes().items() if n != before[k]}


def test_every_choice_is_a_line_and_ids_are_forced(make):
    server = FakeServer([json.dumps(CHAT).encode()])
    middleware = make(server)
    request = {"model": "m", "temperature": 0, "n": 2, "messages": [{"content": "secret"}]}
    headers = [("X-Flywheel-Domain", "sql"), ("X-Flywheel-Conversation", "c1")]
    sent = exchange(middleware, request, headers=headers, parts=3)
    assert json.loads(sent[1]["body"]) == CHAT
    assert server.request == request | {"return_token_ids": True}
    first, second = lines(middleware)
    assert (first["prompt_ids"], first["output_ids"]) == (PROMPT, [7, 8, 2])
    assert (second["choice"], second["output_ids"]) == (1, [9])
    assert second["finish_reason"] == "length"
    assert (first["temperature"], first["top_p"]) == (0, 1.0)
    assert (first["domain"], first["conversation_id"], first["drafter"]) == ("sql", "c1", "v7")
    assert (first["accepted"], first["drafter_sha256"]) == (None, SHA)
    assert "secret" not in middleware.writer.path.read_text()


def test_stream_passes_unbuffered_and_its_ids_are_joined(make):
    middleware = make(FakeServer(STREAM))
    sent = exchange(middleware, {"model": "m", "stream": True})
    assert [message["body"] for message in sent[1:]] == STREAM
    [row] = lines(middleware)
    assert (row["prompt_ids"], row["output_ids"]) == (PROMPT, [7, 8, 2])
    assert (row["finish_reason"], row["stream"]) == ("stop", True)


def test_aborted_stream_keeps_what_was_sent(make):
    middleware = make(FakeServer(STREAM, fail_after=2))
    with pytest.raises(asyncio.CancelledError):
        exchange(middleware, ASK | {"stream": True})
    [row] = lines(middleware)
    assert (row["output_ids"], row["finish_reason"]) == ([7], "abort")


def test_aborted_whole_answer_gives_nothing(make):
    body = json.dumps(CHAT).encode()
    middleware = make(FakeServer([body[:40], body[40:]], fail_after=1))
    with pytest.raises(asyncio.CancelledError):
        exchange(middleware, ASK)
    assert lines(middleware) == []


def test_completions_carry_prompt_ids_per_choice(make):
    choices = [
        {"index": i, "token_ids": [i], "prompt_token_ids": [4, i], "finish_reason": "stop"}
        for i in (1, 2)
    ]
    middleware = make(FakeServer([json.dumps({"id": "x", "choices": choices}).encode()]))
    exchange(middleware, {"prompt": [[4, 1], [4, 2]]}, path="/v1/completions")
    assert [row["prompt_ids"] for row in lines(middleware)] == [[4, 1], [4, 2]]


def test_metadata_labels_and_the_models_sampling_defaults():
    meta = {"domain": "sql", "tenant": 3, "language": "de"}
    body = json.dumps({"temperature": None, "top_k": 5, "metadata": meta}).encode()
    asked = capture_request.read([], body)
    assert asked is not None
    row = asked.record({"temperature": 0.6, "top_k": 20})
    assert (row["domain"], row["tenant"], row["conversation_id"]) == ("sql", "3", None)
    assert row["language"] == "de"
    assert (row["temperature"], row["top_k"], row["top_p"]) == (0.6, 5, 1.0)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/health"])
def test_other_endpoints_are_left_alone(make, path):
    server = FakeServer([b"{}"])
    middleware = make(server)
    exchange(middleware, {"a": 1}, path=path)
    assert server.request == {"a": 1}
    assert lines(middleware) == []


def test_a_label_that_says_nothing_does_not_make_sampling_all_or_nothing(make, monkeypatch):
    """All requests of a client that sends "None" were once one conversation, so sampling kept all
    of them or none.
    """
    monkeypatch.setenv("FLYWHEEL_CAPTURE_SAMPLE", "0.5")
    for label in ("None", "null", "0"):
        middleware = make(FakeServer([json.dumps(CHAT).encode()]))
        for _ in range(60):
            exchange(middleware, {"turn": 1}, headers=[("X-Flywheel-Conversation", label)])
        middleware.writer.close()
        kept = middleware.writer.path.read_text().count("\n") / 2
        middleware.writer.path.unlink()
        assert 5 < kept < 55  # all or none by chance: once in 1e10


def test_sampling_keeps_or_drops_whole_conversations(make, monkeypatch):
    monkeypatch.setenv("FLYWHEEL_CAPTURE_SAMPLE", "0.5")
    middleware = make(FakeServer([json.dumps(CHAT).encode()]))
    for turn in range(2):
        for i in range(40):
            exchange(middleware, {"turn": turn}, headers=[("X-Flywheel-Conversation", f"c{i}")])
    kept = [row["conversation_id"] for row in lines(middleware)]
    assert {kept.count(name) for name in kept} == {4}  # two choices in each of two turns
    assert 8 <= len(set(kept)) <= 32


@pytest.mark.parametrize("body", [b"", b"[1]", b"{"])
def test_what_is_no_request_reaches_the_server_as_it_is(make, body):
    reached = []

    async def app(scope, receive, send):
        reached.append((await receive())["body"])

    middleware = make(app)
    exchange(middleware, body)
    assert reached == [body]
    assert lines(middleware) == []


def test_error_answers_and_answers_without_ids_are_counted_not_written(make, counted):
    for server in (
        FakeServer([b'{"error": "no"}'], status=400),
        FakeServer([b'{"id": "x", "choices": [{"index": 0, "finish_reason": "stop"}]}']),
        FakeServer([b"not json"]),
    ):
        middleware = make(server)
        exchange(middleware, ASK)
        assert lines(middleware) == []
    assert counted() == {"not_ok": 1, "no_ids": 1, "failed": 1}


@pytest.mark.parametrize(("tokens", "outcome"), [(4, "written"), (5, "ids_incomplete")])
def test_an_answer_with_fewer_ids_than_vllm_counted_is_not_written(make, counted, tokens, outcome):
    answer = CHAT | {"usage": {"completion_tokens": tokens}}
    middleware = make(FakeServer([json.dumps(answer).encode()]))
    exchange(middleware, ASK)
    assert len(lines(middleware)) == (2 if outcome == "written" else 0)
    assert counted() == {outcome: 2}


def test_usage_in_every_event_of_a_stream_counts_one_choice(make, counted):
    events = [
        _event({"choices": [_delta([7])], "usage": {"completion_tokens": 1}}),
        _event({"choices": [_delta([8, 2], "stop")], "usage": {"completion_tokens": 3}}),
        _event({"choices": [], "usage": {"completion_tokens": 3}}),
    ]
    middleware = make(FakeServer([STREAM[0], *events, b"data: [DONE]\n\n"]))
    exchange(middleware, ASK | {"stream": True})
    assert [row["output_ids"] for row in lines(middleware)] == [[7, 8, 2]]
    assert counted() == {"written": 1}


def test_a_full_queue_drops_and_counts_and_the_request_goes_on(make, monkeypatch, counted):
    monkeypatch.setattr(capture_writer, "MAX_QUEUE_BYTES", 10)
    middleware = make(FakeServer([json.dumps(CHAT).encode()]))
    sent = exchange(middleware, ASK)
    assert json.loads(sent[1]["body"]) == CHAT
    assert lines(middleware) == []
    assert counted() == {"dropped": 1}


def test_a_faulty_capture_does_not_fail_the_request(make, monkeypatch):
    middleware = make(FakeServer([json.dumps(CHAT).encode()]))
    for step in ("record", "recorder"):
        monkeypatch.setattr(middleware, step, lambda *_: 1 / 0)
        assert len(exchange(middleware, ASK)) == 2
    assert lines(middleware) == []


def test_end_of_life_writes_what_is_queued(make):
    middleware = make(FakeServer([json.dumps(CHAT).encode()]))
    exchange(middleware, ASK)

    async def app(scope, receive, send):
        return

    middleware.app = app
    asyncio.run(middleware({"type": "lifespan"}, None, None))
    assert len(lines(middleware)) == 2


def test_missing_folder_and_bad_share_stop_the_server(monkeypatch, tmp_path):
    monkeypatch.delenv("FLYWHEEL_CAPTURE_DIR", raising=False)
    with pytest.raises(ValueError, match="FLYWHEEL_CAPTURE_DIR is not set"):
        capture.Capture(FakeServer([]))
    monkeypatch.setenv("FLYWHEEL_CAPTURE_DIR", str(tmp_path))
    monkeypatch.setenv("FLYWHEEL_CAPTURE_SAMPLE", "7")
    with pytest.raises(ValueError, match="between 0 and 1"):
        capture.Capture(FakeServer([]))


@pytest.mark.parametrize("values", [["off"], ["True", "false"]])
def test_refused_consent_is_served_unchanged_and_not_recorded(make, counted, values):
    headers = [("X-Flywheel-Consent", value) for value in values]
    server = FakeServer([json.dumps(CHAT).encode()])
    middleware = make(server)
    exchange(middleware, ASK, headers=headers)
    assert server.request == ASK
    assert lines(middleware) == []
    assert counted() == {"no_consent": 1}


def test_echo_is_served_unchanged_and_counted(make, counted):
    server = FakeServer([json.dumps(CHAT).encode()])
    middleware = make(server)
    exchange(middleware, {"prompt": "a", "echo": True}, path="/v1/completions")
    assert server.request == {"prompt": "a", "echo": True}
    assert lines(middleware) == []
    assert counted() == {"not_captured": 1}


@pytest.mark.parametrize("root", ["", "/llm"])
def test_requests_under_a_path_prefix_are_captured(make, counted, root):
    middleware = make(FakeServer([json.dumps(CHAT).encode()]))
    exchange(middleware, ASK, path=f"{root}/v1/chat/completions", root=root)
    assert [row["endpoint"] for row in lines(middleware)] == ["/v1/chat/completions"] * 2
    assert counted() == {"written": 2}


def test_generating_endpoints_that_are_not_captured_are_counted(make, counted):
    middleware = make(FakeServer([b"{}"]))
    for path in ("/v1/responses", "/v1/messages", "/v1/chat/completions/batch", "/tokenize"):
        exchange(middleware, ASK, path=path)
    assert lines(middleware) == []
    assert counted() == {"not_captured": 3}


def test_an_adapter_unloaded_during_its_request_is_still_named(make):
    adapters = {"m": object()}

    class Unloading(FakeServer):
        async def __call__(self, scope, receive, send):
            await super().__call__(scope, receive, send)
            adapters.clear()

    middleware = make(Unloading([json.dumps(CHAT).encode()]))
    models = SimpleNamespace(lora_requests=adapters)
    app = SimpleNamespace(state=SimpleNamespace(openai_serving_models=models))
    exchange(middleware, ASK, server=app)
    assert [row["adapter"] for row in lines(middleware)] == ["m", "m"]
