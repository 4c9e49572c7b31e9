"""Logs with text only: every format, and what is broken in them."""

import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from store import log_formats
from store.digests import digest_log
from store.log_formats import NotUsed, Reject, parse_log
from store.log_to_traffic import _outcomes
from store.schemas import TEXTS
from tests.helpers import text_logs
from tests.helpers.logs import CAPTURE, RULES
from tests.helpers.text_logs import CHAT, LOGS, OBSERVATION, REQUEST, RESPONSE, jsonl


def parse(path, data, rules=RULES) -> list[Any]:
    path.write_bytes(data)
    size, sha256, _ = digest_log(str(path), set())
    return list(parse_log(path, size, sha256, rules))


TIMED = ("pair", "stream", "litellm", "langfuse", "span", "OTLP", "WildChat")
GATEWAYS = ("pair", "stream", "litellm", "langfuse JSONL", "langfuse CSV", "span", "OTLP")


@pytest.mark.parametrize("name", LOGS)
def test_every_format_gives_the_same_conversation(tmp_path, name):
    source, data = LOGS[name]
    (row,) = parse(tmp_path / "log", data)
    assert {*row, "log"} >= {*TEXTS.names}
    assert (row["source"], row["answers"], row["dropped"]) == (source, [1], [])
    assert json.loads(row["messages"]) == CHAT
    if name.startswith(TIMED):
        assert row["captured_at"] == datetime(2026, 12, 1, tzinfo=UTC)
    if name.startswith(GATEWAYS):
        assert (row["domain"], row["model"], row["counted_tokens"]) == ("orders", "m", 7)
    if name.startswith(("WildChat", "LMSYS")):
        assert (row["language"], row["model"]) == ("English", "other")
    assert "192.0.2.1" not in str(row)
    assert "someone" not in str(row)


def test_labels_of_formats(tmp_path):
    def row(name):
        return parse(tmp_path / "log", LOGS[name][1])[0]

    for name in ("litellm spend log", "litellm callback"):
        assert row(name)["tenant"] == "acme"
    named = {n: row(n)["conversation_id"] for n in ("langfuse CSV", "OTLP", "litellm callback")}
    assert named == {"langfuse CSV": "s1", "OTLP": "s1", "litellm callback": "t1"}
    assert row("ShareGPT JSONL")["conversation_id"] == "abc", "abc_1 is a part of it, too"
    assert row("LMSYS JSONL")["conversation_id"] == "l1"
    assert row("messages")["conversation_id"].startswith("text-")
    assert row("pair")["conversation_id"] is None
    assert row("pair")["temperature"] == row("OTLP")["temperature"] == 0.5


def test_token_ids_in_gateways_and_streams_are_the_truth(tmp_path):
    choice = {"index": 0, "finish_reason": "stop", "message": CHAT[1]}
    more = choice | {"provider_specific_fields": {"token_ids": [3, 4]}}
    callback = text_logs.CALLBACK | {
        "completion_tokens": 2,
        "response": {"prompt_token_ids": [1], "choices": [more]},
    }
    (row,) = parse(tmp_path / "log", jsonl(callback))
    assert (row["prompt_ids"].tolist(), row["output_ids"].tolist()) == ([1], [3, 4])
    assert (row["source"], row["ids_source"], row["tenant"]) == ("litellm", "served", "acme")

    first, *_, last = text_logs.CHUNKS
    chunks = [first | {"prompt_token_ids": [1, 2]}]
    for ids in ([3], [4, 5]):
        part = {"index": 0, "delta": {"content": "x"}, "token_ids": ids, "finish_reason": None}
        chunks.append(first | {"choices": [part]})
    counted = last | {"usage": {"completion_tokens": 3}}
    (row,) = parse(tmp_path / "log", jsonl({"request": REQUEST, "response": [*chunks, counted]}))
    assert row["output_ids"].tolist() == [3, 4, 5]
    assert row["finish_reason"] is None, "cut: no chunk said that it ended"
    (other,) = parse(tmp_path / "log", jsonl({"request": REQUEST, "response": [*chunks, last]}))
    assert (type(other), other.reason) == (NotUsed, "ids_incomplete")


def said(*turns):
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


USER, ANSWER = ("user", "u"), ("assistant", "a")
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "city", "arguments": '{"x": 1}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "Porto"}


@pytest.mark.parametrize(
    ("value", "roles", "answers"),
    [
        (said(USER, ANSWER, USER, ANSWER), "uaua", [1, 3]),
        (said(("system", "s"), USER, ANSWER), "sua", [2]),
        (said(("developer", "s"), ("human", "u"), ("bing", "a")), "sua", [2]),
        (said(ANSWER, USER, ANSWER), "ua", [1]),
        (said(USER, ANSWER, USER), "uau", [1, 3]),
        (said(USER, ANSWER, USER, ("assistant", " "), USER, ANSWER), "uau", [1, 3]),
        (said(USER, ANSWER, ANSWER), "ua", [1]),
        (
            {"messages": [*said(USER)["messages"], CALL, RESULT, *said(ANSWER)["messages"]]},
            "uata",
            [1, 3],
        ),
        ({"messages": [*said(USER)["messages"], CALL, *said(ANSWER)["messages"]]}, "ua", [1]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]}]}, "u", [1]),
    ],
)
def test_each_answer_is_asked_for_once_and_tool_rounds_stay_whole(tmp_path, value, roles, answers):
    (row,) = parse(tmp_path / "log", jsonl(value))
    assert "".join(one["role"][0] for one in json.loads(row["messages"])) == roles
    assert row["answers"] == answers
    assert bool(row["dropped"]) == (len(roles) < len(value["messages"]))


def test_of_a_pair_only_the_last_answer_counts(tmp_path):
    """The log has the earlier ones in pairs of their own."""
    history = REQUEST | {"messages": [*CHAT, {"role": "user", "content": "And 4411?"}]}
    (row,) = parse(tmp_path / "log", jsonl({"request": history, "response": RESPONSE}))
    assert row["answers"] == [3]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (said(("Assistant:", "a")), "unknown_role"),
        (said(USER, ("narrator", "a")), "unknown_role"),
        ({"messages": "hi"}, "bad_field:messages"),
        (said(ANSWER), "no_answer"),
        ({"messages": []}, "no_answer"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "not_text",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "not_text"),
        (text_logs.SPEND | {"cache_hit": "True"}, "cache_hit"),
        (text_logs.SPEND | {"messages": "{}", "response": "{}"}, "no_content"),
        (text_logs.SPEND | {"call_type": "aembedding"}, "not_generation"),
        (text_logs.CALLBACK | {"status": "failure"}, "finish_error"),
        (OBSERVATION | {"type": "SPAN"}, "not_generation"),
        (OBSERVATION | {"level": "ERROR"}, "finish_error"),
        (OBSERVATION | {"output": ""}, "no_content"),
        ({"request": {"prompt": "x"}, "response": {"choices": [{"text": "y"}]}}, "raw_prompt"),
        (text_logs.WILDCHAT_LINE | {"redacted": True}, "redacted"),
        ({"attributes": {"gen_ai.operation.name": "chat"}}, "no_content"),
    ],
)
def test_what_is_not_used_has_a_reason(tmp_path, value, expected):
    (outcome,) = parse(tmp_path / "log", jsonl(value))
    assert outcome.reason == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}\n', "bad_text"),
        (
            b'{"messages": [{"role": "user", "role": "system", "content": "u"}]}\n',
            "duplicate_field",
        ),
        (b'{"messages": [], "messages": [{"role": "user", "content": "u"}]}\n', "duplicate_field"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}\n', "not_json"),
        (b'{"messages": [{"role": "user", "content": "u\n', "not_json"),
        (b'{"messages": [{"role": "user", "content": NaN}]}\n', "bad_field:content"),
    ],
)
def test_broken_records_are_rejects_with_place_and_bytes(tmp_path, line, reason):
    good = jsonl({"messages": CHAT})
    first, bad, last = parse(tmp_path / "log", good + line + good)
    assert first["text_id"] == last["text_id"]
    assert (bad.reason, bad.offset, bad.raw) == (reason, len(good), line)


def test_a_bad_label_is_dropped_and_the_answer_kept(tmp_path):
    bad = {"language": ["de"], "tenant": {"a": 1}, "top_k": "many", "seed": 2**70}
    value = {"messages": CHAT, "timestamp": "yesterday", "temperature": float("nan")} | bad
    (row,) = parse(tmp_path / "log", jsonl(value))
    assert {*row["dropped"]} == {*bad, "captured_at", "temperature"}
    assert row["language"] is row["captured_at"] is None
    (served,) = parse(tmp_path / "log", jsonl(CAPTURE | {"language": ["de"]}))
    assert (served["dropped"], served["language"]) == (["language"], None)


@pytest.mark.parametrize("zone", ["2026-12-01T02:00:00+02:00", "2026-12-01T00:00:00Z", 1796083200])
def test_times_of_all_zones_are_one(tmp_path, zone):
    (row,) = parse(tmp_path / "log", jsonl({"messages": CHAT, "timestamp": zone}))
    assert row["captured_at"] == datetime(2026, 12, 1, tzinfo=UTC)


SECRET = [{"role": "user", "content": "my secret"}, CHAT[1]]


@pytest.mark.parametrize(
    "value",
    [
        {"messages": SECRET, "consent": False},
        {"messages": [{"role": "?", "content": "my secret"}], "metadata": {"consent": "off"}},
        {
            "request": {"body": REQUEST | {"messages": SECRET, "metadata": {"consent": "no"}}},
            "response": {},
        },
        text_logs.SPEND | {"messages": "[1]", "metadata": '{"consent": "false", "x": "my secret"}'},
        text_logs.CALLBACK | {"response": 7, "metadata": {"x-flywheel-consent": 0}},
        OBSERVATION | {"input": "my secret", "metadata": '{"consent": null, "Consent": ""}'},
        {"attributes": text_logs.GENAI | {"consent": False}},
        {
            "resourceSpans": [
                {
                    "scopeSpans": [
                        {
                            "spans": [
                                {"attributes": [{"key": "consent", "value": {"boolValue": False}}]}
                            ]
                        }
                    ]
                }
            ]
        },
        {"id": "a", "conversations": "my secret", "consent": "nope"},
    ],
)
@pytest.mark.parametrize("form", [jsonl, lambda value: json.dumps([value], indent=1).encode()])
def test_bytes_without_consent_are_never_kept(tmp_path, value, form):
    (outcome,) = parse(tmp_path / "log", form(value))
    assert (type(outcome), outcome.reason) == (NotUsed, "no_consent")


def test_tables_without_consent_keep_nothing(tmp_path):
    rows = [{"messages": "?", "consent": "no"}, {"messages": "!", "consent": "yes"}]
    for data in (text_logs.as_csv(*rows), text_logs.parquet(*rows)):
        refused, bad = parse(tmp_path / "log", data)
        assert (refused.reason, bad.reason) == ("no_consent", "bad_field:messages")
        assert b"!" in bad.raw


def test_addresses_are_in_no_reject(tmp_path):
    bad = text_logs.WILDCHAT_LINE | {"conversation": [{"role": "?", "hashed_ip": "00"}]}
    (reject,) = parse(tmp_path / "log", jsonl(bad))
    assert (reject.reason, reject.raw) == ("unknown_role", b"")


def sharegpt(count, indent):
    return json.dumps([text_logs.SHAREGPT | {"id": f"x{i}_0"} for i in range(count)], indent=indent)


@pytest.mark.parametrize("indent", [2, None])
def test_an_array_that_ends_inside_a_string_gives_all_before_it(tmp_path, indent):
    """So does the public ShareGPT file."""
    data = sharegpt(50, indent).encode()[:-30]
    *rows, cut = parse(tmp_path / "log", data)
    assert [row["request_id"] for row in rows] == [f"x{i}_0" for i in range(49)]
    assert (cut.reason, cut.raw) == ("cut_line", data[cut.offset :])
    assert cut.raw.startswith(b"{")
    assert b"x49_0" in cut.raw


@pytest.mark.parametrize("indent", [2, 1])
def test_one_damaged_element_does_not_hide_the_next(tmp_path, indent):
    data = sharegpt(9, indent).replace('"x4_0",', '"x4_0", {[', 1).encode()
    outcomes = parse(tmp_path / "log", data)
    assert [type(one) is Reject for one in outcomes] == [i == 4 for i in range(9)]
    assert data[outcomes[4].offset :].startswith(outcomes[4].raw)


def test_an_element_that_is_too_large_is_a_reject_and_the_next_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(log_formats, "MAX_LINE_BYTES", 3 << 20)
    values = [
        text_logs.SHAREGPT | {"id": f"x{i}", "more": "y" * (5 << 20) * (i == 1)} for i in range(4)
    ]
    outcomes = parse(tmp_path / "log", json.dumps(values, indent=2).encode())
    assert [getattr(one, "reason", None) for one in outcomes] == [None, "line_too_long", None, None]


def test_elements_on_lines_and_text_like_json_are_whole(tmp_path):
    """Brackets, quotes and dividers inside of strings divide nothing."""
    text = 'a "},\n{" \\ [ { } ] },{'
    values = [{"messages": [{"role": "user", "content": f"{text}{i}"}]} for i in range(40)]
    parts = ",\n".join(map(json.dumps, values))
    for data in (json.dumps(values), json.dumps(values, indent=1), f"[\n{parts}\n]"):
        rows = parse(tmp_path / "log", data.encode())
        assert [json.loads(row["messages"])[0]["content"] for row in rows] == [
            f"{text}{i}" for i in range(40)
        ]


@pytest.mark.parametrize(
    "data",
    [
        json.dumps({"vocab_size": 10}, indent=2).encode(),
        json.dumps([{"a": 1}, {"b": 2}]).encode(),
        text_logs.parquet({"x": 1}),
        b"PAR1 cut",
    ],
)
def test_other_peoples_files_are_one_line_and_no_rejects(tmp_path, data):
    (tmp_path / "log").write_bytes(data)
    size, sha, _ = digest_log(str(tmp_path / "log"), set())
    outcome: Any
    (outcome,) = _outcomes(str(tmp_path / "log"), size, sha, RULES, None, None)
    assert (type(outcome), outcome.reason) == (NotUsed, "other_file")


def test_a_damaged_row_of_csv_hides_no_other(tmp_path):
    data = text_logs.as_csv(*[OBSERVATION | {"id": f"r{i}"} for i in range(3)]).splitlines(True)
    outcomes = parse(tmp_path / "log", b"".join([*data[:2], b"a" + b",b" * 99 + b"\n", *data[2:]]))
    assert [getattr(one, "reason", None) for one in outcomes] == [None, "bad_row", None, None]
    assert outcomes[1].offset == len(data[0]) + len(data[1])


ODD = [
    None,
    7,
    -1.5,
    True,
    "",
    "x",
    "\u00b2",
    [],
    [7],
    [None],
    {},
    {"a": 1},
    "[1]",
    '{"a": 1}',
    [{}],
]
WHOLE = [json.loads(data.splitlines()[0]) for _, data in LOGS.values() if data[:2] == b'{"']


def places(value):
    """(container, key) of every value in a JSON value."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield value, key
        yield from places(value[key])


@pytest.mark.parametrize("value", WHOLE)
def test_any_value_at_any_place_stops_nothing(tmp_path, value):
    lines = []
    for i in range(len([*places(value)])):
        for odd in ODD[i % 5 :: 5]:
            copy = json.loads(json.dumps(value))
            container, key = [*places(copy)][i]
            container[key] = odd
            line = json.dumps(copy)
            lines.append(line.encode())
            if isinstance(key, str):  # the same name again, with another value
                twice = json.dumps(key) + ": 0, " + json.dumps(key) + ": "
                lines.append(line.replace(json.dumps(key) + ": ", twice).encode())
    found = parse(tmp_path / "log", b"\n".join(lines))
    assert len(found) >= len(lines)  # another index of a chunk makes two choices of one
    pa.Table.from_pylist(
        [row for row in found if isinstance(row, dict) and "text_id" in row], TEXTS
    )
