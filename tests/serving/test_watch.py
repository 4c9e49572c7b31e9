"""Rounds of every answer, around an application with an engine like vLLM's."""

import asyncio
import json

import pytest
from prometheus_client import REGISTRY

from serving import acceptance_feed, capture, loaded, watch, watched_engine
from serving.loaded import Loaded
from tests.helpers.fake_engine import (
    EngineApp,
    FakeEngine,
    VLLMClientError,
    metrics,
    output,
)
from tests.serving.test_capture import exchange, lines

SHA = "0123456789ab" * 5 + "cdef"
ASK = {"model": "m", "messages": [{"role": "user", "content": "secret"}], "stream": True}
LABELS = [("X-Flywheel-Domain", "sql"), ("X-Flywheel-Conversation", "c1")]
TWELVE = [
    output(0, [4]),
    output(0, [5, 6, 7, 8]),
    output(0, [9, 10], "stop", metrics([3, 5], [7, 7])),
]
"""Seven tokens: the engine accepted five drafts in the last step, and the text ended after two."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """An empty feed, and a drafter of version 7."""
    feed = acceptance_feed.Feed()
    for name in ("add", "count", "read"):
        monkeypatch.setattr(acceptance_feed, name, getattr(feed, name))
    monkeypatch.setattr(loaded, "_current", Loaded("7", SHA))
    return feed


def ask(app, request=ASK, headers=LABELS, path="/v1/chat/completions", middleware=None):
    """The rows of one request."""
    before = acceptance_feed.read(0)["next"]
    middleware = middleware or watch.Watch(app)
    exchange(middleware, request, headers=headers, path=path, server=app)
    return acceptance_feed.read(before)["rows"]


def test_a_stream_gives_a_row_cut_at_its_end_and_is_not_touched():
    app = EngineApp(FakeEngine(TWELVE))
    [row] = ask(app)
    assert json.loads(app.bodies[0]) == ASK
    assert (row["accepted"], row["drafted"]) == ([3, 1], [7, 7])
    assert (row["drafter_version"], row["drafter_sha256"], row["k"]) == ("7", SHA, 7)
    assert (row["request_id"], row["domain"], row["conversation_id"]) == ("chatcmpl-9", "sql", "c1")
    assert (row["prompt_tokens"], row["output_tokens"], row["finish_reason"]) == (3, 7, "stop")
    assert (row["temperature"], row["concurrency"], row["tenant"]) == (0.5, 1, None)
    assert 0 <= row["first_token_seconds"] <= row["seconds"]
    assert row["finished_at"] == pytest.approx(row["started_at"] + row["seconds"])


def test_choices_of_several_prompts_are_numbered_as_in_the_response():
    one = [output(0, [4, 5], "stop", metrics([0], [7])), output(1, [4], "length", metrics([], []))]
    two = [output(1, [4, 5, 6], "stop", metrics([1], [6])), output(0, [4], "stop", metrics([], []))]
    app = EngineApp(FakeEngine(one, two, n=2), name="cmpl-3")
    rows = ask(app, path="/v1/completions")
    assert [row["request_id"] for row in rows] == ["cmpl-3", "cmpl-3/1", "cmpl-3/2", "cmpl-3/3"]
    assert [row["accepted"] for row in rows] == [[0], [], [], [1]]
    assert acceptance_feed.read(0)["requests"] == 1


def test_a_whole_answer_has_the_engines_own_time_of_its_first_token():
    ids = [4, 5, 6]
    app = EngineApp(
        FakeEngine([output(0, ids, "stop", metrics([1], [7]), 0.25)], kind="FINAL_ONLY")
    )
    [row] = ask(app)
    assert (row["output_tokens"], row["first_token_seconds"]) == (3, 0.25)


def test_a_request_id_of_any_length_is_kept_short():
    """Clients choose it, and the feed keeps thousands."""
    [row] = ask(EngineApp(FakeEngine(TWELVE), name="chatcmpl-" + "x" * 1_000_000))
    assert row["request_id"].startswith("chatcmpl-x")
    assert len(row["request_id"]) <= 200


@pytest.mark.parametrize("value", ["false", "maybe", ""])
def test_without_consent_only_counts_are_left(value):
    headers = [*LABELS, ("X-Flywheel-Tenant", "acme"), ("X-Flywheel-Consent", value)]
    [row] = ask(EngineApp(FakeEngine(TWELVE)), headers=headers)
    assert row["accepted"] == [3, 1]
    assert not {"sql", "c1", "acme", "chatcmpl-9"} & {str(value) for value in row.values()}


def test_a_body_that_cannot_be_read_gives_counts():
    [row] = ask(EngineApp(FakeEngine(TWELVE)), b'{"messages": [\xff]}')
    assert (row["accepted"], row["domain"]) == ([3, 1], None)


def test_a_server_without_a_drafter_has_rows_without_rounds(monkeypatch):
    monkeypatch.setattr(loaded, "_current", Loaded("", ""))
    [row] = ask(EngineApp(FakeEngine([output(0, [4, 5, 6], "stop")]), k=0))
    assert (row["k"], row["accepted"], row["drafter_sha256"]) == (0, [], "")
    assert counted("none", "finished") >= 1


def test_a_swap_during_a_request_leaves_its_drafter_open(monkeypatch):
    engine = FakeEngine(TWELVE)
    engine.meanwhile = lambda: loaded.swapped("8", SHA[::-1])
    before = counted("swapped", "finished")
    [row] = ask(EngineApp(engine))
    assert (row["drafter_version"], row["drafter_sha256"]) == (None, None)
    engine.meanwhile = lambda: loaded.swapped("8", SHA[::-1])  # loaded anew: the rounds are mixed
    assert ask(EngineApp(engine))[0]["drafter_sha256"] is None
    assert counted("swapped", "finished") == before + 2


def counted(label, outcome):
    labels = {"drafter": label, "outcome": outcome}
    return REGISTRY.get_sample_value("flywheel_requests_total", labels) or 0


LABEL = Loaded("7", SHA).label


def test_a_client_that_goes_away_is_counted_unless_its_choice_had_ended():
    before = counted(LABEL, "aborted")
    for stop, rows in ((1, []), (3, [[3, 1]])):
        engine = FakeEngine([*TWELVE, output(1, [4]), output(1, [5])], n=2)
        app = EngineApp(engine, stop_after=stop)
        with pytest.raises(asyncio.CancelledError):
            ask(app)
        assert [row["accepted"] for row in acceptance_feed.read(0)["rows"]] == rows
    assert counted(LABEL, "aborted") == before + 2
    assert acceptance_feed.read(0)["failed"] == 0


def test_an_engine_that_fails_is_a_failure_and_a_client_that_errs_is_none():
    for error, failed in ((RuntimeError("dead"), 1), (VLLMClientError("too long"), 1)):
        with pytest.raises(type(error)):
            ask(EngineApp(FakeEngine([TWELVE[0], error])))
        assert acceptance_feed.read(0)["failed"] >= failed
        assert acceptance_feed.read(0)["rows"] == []
    [] = ask(EngineApp(FakeEngine([output(0, [4]), output(0, [], "error")])))


def test_a_stop_string_is_uncounted():
    before = counted(LABEL, "uncounted")
    [row] = ask(EngineApp(FakeEngine([output(0, [4, 5]), output(0, [6], "stop")])))
    assert (row["accepted"], row["output_tokens"]) == ([], 3)
    assert counted(LABEL, "uncounted") == before + 1


def test_a_summary_without_steps_is_uncounted():
    spec = metrics([2], [7])
    spec.per_step_accepted = spec.per_step_drafted = []
    [row] = ask(EngineApp(FakeEngine([output(0, [4, 5, 6, 7], "stop", spec)])))
    assert row["accepted"] == []


def test_steps_without_drafts_are_rounds_that_drafted_nothing():
    """With K = 0 for large batches, vLLM counts only the steps in between."""
    [row] = ask(EngineApp(FakeEngine([output(0, [*range(9)], "stop", metrics([2], [3]))])))
    assert row["accepted"] == [2, 0, 0, 0, 0, 0]
    assert row["drafted"] == [3, 0, 0, 0, 0, 0]


def test_outputs_of_another_shape_cost_counts_and_no_answer():
    """A later vLLM may rename what is read."""
    broken = output(0, [4, 5], "stop", metrics([0], [7]))
    del broken.outputs[0].spec_decode_metrics
    app = EngineApp(FakeEngine([broken]))
    before = counted(LABEL, "uncounted")
    assert ask(app) == []
    assert counted(LABEL, "uncounted") == before + 1
    app.engine.params.output_kind = None
    assert ask(app) == []


def test_beam_search_asks_for_parts_of_answers_and_gives_no_rows_with_rounds():
    [row] = ask(EngineApp(FakeEngine(TWELVE)), ASK | {"use_beam_search": True})
    assert row["accepted"] == []


def test_the_engine_is_wrapped_once_and_its_generators_are_closed():
    app = EngineApp(FakeEngine(TWELVE))
    ask(app)
    wrapped = app.engine.generate
    ask(app)
    assert app.engine.generate == wrapped
    assert app.engine.closed == 2
    assert watched_engine._at_work.get() is None


def test_requests_side_by_side_are_told_apart(fresh):
    """Their outputs interleave on one event loop."""
    app = EngineApp(FakeEngine(TWELVE))
    middleware = watch.Watch(app)

    async def one(i):
        body = json.dumps(ASK | {"metadata": {"domain": f"d{i}"}}).encode()
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "app": app}

        async def receive():
            return {"type": "http.request", "body": body}

        async def send(message):
            await asyncio.sleep(0)

        await middleware({**scope, "headers": []}, receive, send)

    async def several():
        await asyncio.gather(*(one(i) for i in range(16)))

    asyncio.run(several())
    rows = acceptance_feed.read(0)["rows"]
    assert {row["domain"] for row in rows} == {f"d{i}" for i in range(16)}
    assert [row["accepted"] for row in rows] == [[3, 1]] * 16
    assert max(row["concurrency"] for row in rows) == 16
    assert middleware.in_flight == 0


@pytest.fixture
def captured(monkeypatch, tmp_path):
    monkeypatch.setenv("FLYWHEEL_CAPTURE_DIR", str(tmp_path))
    monkeypatch.setenv("FLYWHEEL_REPLICA", "east-1")

    def records(app, request=ASK, headers=LABELS):
        middleware = capture.Capture(app)
        ask(app, request, headers, middleware=middleware)
        return lines(middleware)

    return records


def test_a_record_has_the_rounds_and_the_drafter(captured):
    [row] = captured(EngineApp(FakeEngine(TWELVE)))
    assert (row["accepted"], row["drafted"]) == ([3, 1], [7, 7])
    assert (row["drafter"], row["drafter_sha256"], row["replica"]) == ("7", SHA, "east-1")
    assert (row["k"], row["concurrency"]) == (7, 1)
    assert row["first_token_seconds"] <= row["finished_at"] - row["started_at"]
    assert row["finish_reason"] == "stop"


def test_a_record_of_a_swapped_request_keeps_its_tokens(captured):
    engine = FakeEngine(TWELVE)
    engine.meanwhile = lambda: loaded.swapped("8", SHA[::-1])
    swapped = capture._outcomes.labels("swapped")
    before = swapped._value.get()
    [row] = captured(EngineApp(engine))
    assert row["output_ids"] == [4, 5, 6, 7, 8, 9, 10]
    assert (row["drafter"], row["drafter_sha256"], row["accepted"]) == (None, None, None)
    assert swapped._value.get() == before + 1


def test_rounds_that_do_not_make_up_the_clients_tokens_are_left_out(captured):
    """A reasoning parser may keep the ids of some tokens to itself."""
    app = EngineApp(FakeEngine(TWELVE))
    whole = app._event
    app._event = lambda prompt, part: b"" if part.token_ids == [4] else whole(prompt, part)
    [row] = captured(app)
    assert (len(row["output_ids"]), row["accepted"]) == (6, None)


def test_a_fault_of_the_feed_reaches_no_request(monkeypatch):
    monkeypatch.setattr(acceptance_feed, "add", lambda *_: 1 / 0)
    app = EngineApp(FakeEngine(TWELVE))
    assert ask(app) == []
    assert app.engine.closed == 1
