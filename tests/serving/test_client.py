"""The client, the speed comparison and the greedy check against a small HTTP server."""

import json
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from serving.client import Completion, Request, compare_speeds, complete, counter
from serving.greedy import read_again
from serving.vllm_counts import rounds, served_row

PROMPT = [1, 2]


class Handler(BaseHTTPRequestHandler):
    """Answers token i + 1 after prompt [.., i]; 13 is refused."""

    server: "FakeVllm"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body, dict(self.headers)))
        with self.server.lock:
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
        time.sleep(self.server.delay)
        with self.server.lock:
            self.server.running -= 1
        self._answer(body)

    def _answer(self, body):
        chat = "messages" in body
        last = 40 if chat else body["prompt"][-1]
        status = 400 if last == 13 else 200
        choice = {"token_ids": [last + 1], "finish_reason": "length"}
        choice |= {"message": {"content": "hi"}} if chat else {"text": "hi"}
        if "logprobs" in body:
            top = {"token_id:7": -1.0, "token_id:8": -1.0005, "token_id:9": -3.0}
            choice["logprobs"] = {"top_logprobs": [top]}
        if "prompt_logprobs" in body:
            told = {7: {"logprob": -1.0}, 8: {"logprob": -1.5}, 9: {"logprob": -4.0}}
            choice["prompt_logprobs"] = [None, *[told] * (len(body["prompt"]) - 1)]
        answer = {"id": "r", "prompt_token_ids": PROMPT, "choices": [choice], "metrics": None}
        data = json.dumps(answer if status == 200 else {"error": "unlucky"}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


class FakeVllm(ThreadingHTTPServer):
    """Remembers what it was asked and how many requests ran at once."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.seen, self.lock = [], threading.Lock()
        self.running = self.most = 0
        self.delay = 0.0


@pytest.fixture
def server():
    with FakeVllm() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def answer(output_ids, spec=None):
    return Completion(
        request_id="r",
        prompt_ids=PROMPT,
        output_ids=output_ids,
        text="",
        finish_reason="stop",
        spec=spec,
        top_logprobs=[],
        started=0.0,
        seconds=2.0,
        decode_seconds=None,
    )


def test_answers_come_in_order_and_concurrency_is_kept(server):
    server.delay = 0.05
    requests = [Request(prompt=[i], max_tokens=1) for i in range(20, 32)]
    answers = complete(server.url, requests, 4)
    assert [one.output_ids for one in answers] == [[i + 1] for i in range(20, 32)]
    assert server.most == 4
    assert all(0.05 <= one.seconds < 5 for one in answers)


def test_chat_and_token_prompts_become_the_right_requests(server):
    chat = Request(
        prompt=[{"role": "user", "content": "x"}], max_tokens=3, domain="sql", conversation="c"
    )
    tokens = Request(prompt=[4, 5], max_tokens=2, temperature=0.5, seed=7, extra={"top_k": 3})
    first, _ = complete(server.url, [chat, tokens], 1)
    assert (first.text, first.prompt_ids) == ("hi", PROMPT)
    (path, body, headers), (path2, body2, headers2) = server.seen
    assert path == "/v1/chat/completions"
    assert (body["messages"], body["temperature"]) == (chat.prompt, 0.0)
    assert (headers["X-Flywheel-Domain"], headers["X-Flywheel-Conversation"]) == ("sql", "c")
    assert path2 == "/v1/completions"
    assert (body2["prompt"], body2["seed"], body2["top_k"]) == ([4, 5], 7, 3)
    assert body["return_token_ids"] is body2["return_token_ids"] is True
    assert "X-Flywheel-Domain" not in headers2


def test_a_refused_request_raises_the_servers_words(server):
    requests = [Request(prompt=[i], max_tokens=1) for i in (12, 13, 14)]
    with pytest.raises(ValueError, match=r"400.*unlucky"):
        complete(server.url, requests, 2)


def test_no_server_is_one_clear_error():
    with pytest.raises(ValueError, match=r"no answer from http://127\.0\.0\.1:9/v1"):
        complete("http://127.0.0.1:9", [Request(prompt=[1], max_tokens=1)], 1)
    with pytest.raises(ValueError, match=r"no answer from http://127\.0\.0\.1:9/metrics"):
        counter("http://127.0.0.1:9", "vllm:any")


@pytest.fixture
def passes(monkeypatch):
    """The order of the passes over servers p and d; each gives the next of its rates."""
    calls, rates = [], {"p": iter([10.0, 20.0, 40.0, 7.0]), "d": iter([15.0, 60.0, 80.0, 7.0])}
    monkeypatch.setattr("serving.client.complete", lambda *args, **kw: [])
    monkeypatch.setattr(
        "serving.client._pass",
        lambda url, *_: calls.append(url) or (next(rates[url]), [len(calls) / 10]),
    )
    return calls


SIDES = (lambda: "p", lambda: "d")
ONE = [Request(prompt=[1], max_tokens=1)]


def test_speed_is_interleaved_and_its_ratio_is_that_of_pairs(passes):
    [speed] = compare_speeds(SIDES, {8: ONE}, repeats=3)
    assert passes == ["p", "d", "d", "p", "p", "d"]
    assert (speed.plain, speed.drafted) == ([10.0, 20.0, 40.0], [15.0, 60.0, 80.0])
    assert speed.ratio == 2.0  # the median of 1.5, 3, 2
    assert (speed.plain_seconds, speed.drafted_seconds) == ([0.1, 0.4, 0.5], [0.2, 0.3, 0.6])


def test_where_one_server_fits_each_side_has_all_its_passes_at_once(passes):
    speeds = compare_speeds(SIDES, {1: ONE, 8: ONE}, repeats=2, interleaved=False)
    assert passes == ["d"] * 4 + ["p"] * 4
    assert [s.concurrency for s in speeds] == [1, 8]
    assert [s.plain for s in speeds] == [[10.0, 20.0], [40.0, 7.0]]
    assert [s.drafted for s in speeds] == [[15.0, 60.0], [80.0, 7.0]]


def test_answers_are_read_again_in_one_pass_each(server):
    """The last token is what the server is asked for: an answer that fills the context fits."""
    found = read_again(server.url, [answer([7, 8, 9]), answer([8])], 1, "")
    assert found.gaps == [
        [pytest.approx(0.0), pytest.approx(0.5), pytest.approx(2.0)],
        [pytest.approx(0.0005)],
    ]
    assert (found.tokens, found.lost) == (4, 3)
    assert [body["prompt"] for _, body, _ in server.seen] == [[*PROMPT, 7, 8], PROMPT]
    assert {body["max_tokens"] for _, body, _ in server.seen} == {1}


def test_served_rounds_are_cut_at_the_end_of_the_answer():
    spec = {"per_step_accepted": [3, 5], "per_step_drafted": [5, 5], "num_spec_tokens": 5}
    assert rounds(answer([0] * 7, spec)) == ([3, 1], [5, 5])
    row = served_row(
        answer([0] * 7, spec),
        sample_id="s",
        conversation_id="c",
        domain="sql",
        target_id="t",
        drafter_version="3",
        block_size=6,
        temperature=0.0,
        replica="a",
    )
    assert (row["origin"], row["k"], row["accepted"]) == ("served", 5, [3, 1])
    assert (row["finished_at"] - row["started_at"]).total_seconds() == 2.0


def test_an_answer_of_one_token_has_no_round():
    spec = {"num_spec_steps": 0, "num_spec_tokens": 5}
    assert rounds(answer([7], spec)) == ([], [])
    null = {"per_step_accepted": None, "per_step_drafted": None}  # as in vLLM's response
    assert rounds(answer([7], spec | null)) == ([], [])


def test_the_step_that_fills_the_context_is_a_round_without_drafts():
    spec = {"per_step_accepted": [2, 0], "per_step_drafted": [3, 1], "num_spec_steps": 2}
    full = replace(answer([0] * 6, spec), finish_reason="length")
    assert rounds(full) == ([2, 0, 0], [3, 1, 0])
    for other in (answer([0] * 6, spec), replace(full, output_ids=[0] * 7)):
        with pytest.raises(ValueError, match="belong to another answer"):
            rounds(other)


@pytest.mark.parametrize("spec", [None, {"num_spec_steps": 3}])
def test_answers_without_metrics_per_step_have_no_rounds(spec):
    with pytest.raises(ValueError, match=r"no speculative metrics.*not by stop strings"):
        rounds(answer([1, 2], spec))
