"""A small log of our own in the exact shape of every format, all of the same short conversation."""

import csv
import gzip
import io
import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ASKED, SAID = "Where is order 4410?", "It left Porto today."
CHAT = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}]
NANOSECONDS = 1796083200 * 10**9
TIME = datetime.fromtimestamp(1796083200, UTC)


def jsonl(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def parquet(*rows: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([*rows]), sink)
    return sink.getvalue()


def as_csv(*rows: dict[str, Any]) -> bytes:
    sink = io.StringIO(newline="")
    writer = csv.DictWriter(sink, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue().encode()


REQUEST = {"model": "m", "temperature": 0.5, "messages": CHAT[:1], "metadata": {"domain": "orders"}}
RESPONSE = {
    "id": "r1",
    "object": "chat.completion",
    "created": 1796083200,
    "model": "m",
    "choices": [{"index": 0, "message": CHAT[1], "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16},
}
CHUNKS = [
    {
        "id": "r1",
        "object": "chat.completion.chunk",
        "created": 1796083200,
        "model": "m",
        "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
    }
    for delta, reason in (
        ({"role": "assistant", "content": ""}, None),
        ({"content": SAID[:5]}, None),
        ({"content": SAID[5:]}, "stop"),
    )
] + [{"id": "r1", "choices": [], "usage": {"completion_tokens": 7}}]
EVENTS = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in CHUNKS) + "data: [DONE]\n\n"
SPEND = {
    "request_id": "r1",
    "call_type": "acompletion",
    "api_key": "hash",
    "spend": 0.01,
    "completion_tokens": 7,
    "startTime": "2026-12-01 00:00:00.000",
    "endTime": "2026-12-01 00:00:01.000",
    "model": "m",
    "metadata": json.dumps({"user_api_key_team_id": "acme", "domain": "orders"}),
    "cache_hit": "False",
    "requester_ip_address": "192.0.2.1",
    "messages": json.dumps(CHAT[:1]),
    "response": json.dumps(RESPONSE),
}
CALLBACK = {
    "id": "r1",
    "trace_id": "t1",
    "call_type": "acompletion",
    "status": "success",
    "completion_tokens": 7,
    "startTime": 1796083200.0,
    "endTime": 1796083201.0,
    "model": "m",
    "metadata": {"team_id": "acme", "domain": "orders"},
    "cache_hit": None,
    "messages": CHAT[:1],
    "response": RESPONSE,
    "model_parameters": {"temperature": 0.5},
}
OBSERVATION = {
    "id": "r1",
    "trace_id": "t1",
    "session_id": "s1",
    "type": "GENERATION",
    "parent_observation_id": "",
    "start_time": "2026-12-01 00:00:00.000000",
    "name": "chat",
    "metadata": json.dumps({"domain": "orders"}),
    "input": json.dumps(CHAT[:1]),
    "output": json.dumps(CHAT[1]),
    "provided_model_name": "m",
    "model_parameters": json.dumps({"temperature": 0.5}),
    "usage_details": json.dumps({"input": 9, "output": 7}),
    "user_id": "someone",
}
API = {"id": "r1", "traceId": "t1", "type": "GENERATION", "startTime": "2026-12-01T00:00:00Z"}
API |= {"input": {"messages": CHAT[:1]}, "output": SAID, "model": "m"}
GENAI = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "m",
    "gen_ai.request.temperature": 0.5,
    "gen_ai.response.id": "r1",
    "gen_ai.conversation.id": "s1",
    "gen_ai.usage.output_tokens": 7,
    "gen_ai.input.messages": [{"role": "user", "parts": [{"type": "text", "content": ASKED}]}],
    "gen_ai.output.messages": [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": SAID}],
            "finish_reason": "stop",
        }
    ],
    "domain": "orders",
}
SPAN = {"startTimeUnixNano": NANOSECONDS, "attributes": GENAI}


def typed(value: Any) -> dict[str, Any]:
    """A value as OTLP writes it in JSON."""
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"stringValue": value if isinstance(value, str) else json.dumps(value)}


OTLP_SPAN = {
    "startTimeUnixNano": str(NANOSECONDS),
    "attributes": [{"key": key, "value": typed(value)} for key, value in GENAI.items()],
}
OTLP = {"resourceSpans": [{"resource": {}, "scopeSpans": [{"spans": [OTLP_SPAN, {"name": "x"}]}]}]}
SHAREGPT = {
    "id": "abc_0",
    "conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": SAID}],
}
WILDCHAT_TURN = {"language": "English", "country": "X", "hashed_ip": "00", "redacted": False}
WILDCHAT = {
    "conversation_hash": "h1",
    "model": "other",
    "timestamp": TIME,
    "conversation": [turn | WILDCHAT_TURN for turn in CHAT],
    "turn": 1,
    "language": "English",
    "redacted": False,
}
LMSYS = {
    "conversation_id": "l1",
    "model": "other",
    "conversation": CHAT,
    "turn": 1,
    "language": "English",
    "redacted": False,
}
WILDCHAT_LINE = WILDCHAT | {"timestamp": "2026-12-01T00:00:00"}

LOGS: dict[str, tuple[str, bytes]] = {
    "pair": ("openai", jsonl({"request": REQUEST, "response": RESPONSE})),
    "pair in texts": (
        "openai",
        jsonl({"req": json.dumps(REQUEST), "resp": json.dumps(RESPONSE)}),
    ),
    "pair of bodies": (
        "openai",
        jsonl({"request": {"body": REQUEST}, "response": {"body": RESPONSE}}),
    ),
    "stream": ("openai", jsonl({"request": REQUEST, "response": CHUNKS})),
    "stream of events": ("openai", jsonl({"request": REQUEST, "response": EVENTS})),
    "litellm spend log": ("litellm", jsonl(SPEND)),
    "litellm spend log in CSV": ("litellm", as_csv(SPEND)),
    "litellm callback": ("litellm", jsonl(CALLBACK)),
    "langfuse JSONL": ("langfuse", jsonl(OBSERVATION)),
    "langfuse CSV": ("langfuse", as_csv(OBSERVATION)),
    "langfuse Parquet": ("langfuse", parquet(OBSERVATION)),
    "langfuse API": ("langfuse", jsonl(API)),
    "span": ("opentelemetry", jsonl(SPAN)),
    "OTLP": ("opentelemetry", jsonl(OTLP)),
    "OTLP, indented": ("opentelemetry", json.dumps(OTLP, indent=2).encode()),
    "ShareGPT array": ("sharegpt", json.dumps([SHAREGPT], indent=2).encode()),
    "ShareGPT array on one line": ("sharegpt", json.dumps([SHAREGPT]).encode()),
    "ShareGPT JSONL": ("sharegpt", jsonl(SHAREGPT)),
    "WildChat Parquet": ("conversation", parquet(WILDCHAT)),
    "WildChat JSONL": ("conversation", jsonl(WILDCHAT_LINE)),
    "LMSYS Parquet": ("conversation", parquet(LMSYS)),
    "LMSYS JSONL": ("conversation", jsonl(LMSYS)),
    "messages": ("messages", jsonl({"messages": CHAT})),
    "messages, gzip": ("messages", gzip.compress(jsonl({"messages": CHAT}), mtime=0)),
    "prompt": ("prompt", jsonl({"prompt": ASKED, "completion": SAID})),
    "prompt of messages": ("prompt", jsonl({"prompt": CHAT[:1], "completion": CHAT[1:]})),
}
"""Name -> (format, bytes of a log with the conversation in it)."""
