"""Records of OpenTelemetry's GenAI spans (gen_ai.input.messages, gen_ai.output.messages ...)."""

from collections.abc import Iterator
from typing import Any

from store.labels import METADATA
from store.log_fields import Refused
from store.objects import parsed
from store.shaped_answers import SAMPLER

Record = dict[str, Any]


def is_span(value: Record) -> bool:
    """Whether an object is a span with attributes of gen_ai, or an export of spans."""
    if "resourceSpans" in value or "scopeSpans" in value:
        return True
    told = value.get("attributes")
    return told is not None and any(str(k).startswith("gen_ai.") for k in _attributes(told))


def read(value: Record) -> list[Record]:
    """Spans of OpenTelemetry's GenAI conventions: one span, or an OTLP export of many."""
    found = []
    for span in _spans(value):
        told = _attributes(span.get("attributes"))
        answers = parsed(told.get("gen_ai.output.messages"))
        asked = parsed(told.get("gen_ai.input.messages"))
        if not isinstance(asked, list) or not isinstance(answers, list) or not answers:
            continue  # a span of something else, or one whose content was not recorded
        system = parsed(told.get("gen_ai.system_instructions"))
        start = [{"role": "system", "parts": system}] if system else []
        metadata = {name: told[name] for name in METADATA if told.get(name)}
        counted = _whole(told.get("gen_ai.usage.output_tokens"))
        nanoseconds = _whole(span.get("startTimeUnixNano") or span.get("start_time_unix_nano"))
        shared = {name: _number(told.get(f"gen_ai.request.{name}")) for name in SAMPLER}
        shared |= metadata | {
            "conversation_id": metadata.get("conversation_id")
            or told.get("gen_ai.conversation.id"),
            "request_id": told.get("gen_ai.response.id"),
            "captured_at": nanoseconds / 1e9 if nanoseconds else None,
            "model": told.get("gen_ai.response.model") or told.get("gen_ai.request.model"),
            "completion_tokens": counted,
            "turns": "last",
            "tools": parsed(told.get("gen_ai.tool.definitions")),
        }
        for answer in answers if len(answers) == 1 else []:
            reason = answer.get("finish_reason") if isinstance(answer, dict) else None
            reason = "tool_calls" if reason == "tool_call" else reason
            messages = [m for one in [*start, *asked, answer] for m in _from_parts(one)]
            found.append(shared | {"messages": messages, "finish_reason": reason})
    if not found:
        raise Refused("no_content")
    return found


def _spans(value: Record) -> Iterator[Record]:
    left: list[Any] = [value]
    while left:
        part = left.pop(0)
        inner = (
            [part.get(n) for n in ("resourceSpans", "scopeSpans", "spans")]
            if isinstance(part, dict)
            else []
        )
        if not any(isinstance(one, list) for one in inner) and isinstance(part, dict):
            yield part
        left += [one for each in inner if isinstance(each, list) for one in each]


def _attributes(told: Any) -> Record:
    """Attributes as an object; OTLP has a list of {"key": .., "value": {"stringValue": ..}}."""
    if isinstance(told, dict):
        return told
    pairs = [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []
    return {str(one.get("key")): _plain(one.get("value")) for one in pairs}


def _plain(value: Any) -> Any:
    """A value of OTLP without the object that says its type."""
    if not isinstance(value, dict) or len(value) != 1:
        return value
    [(kind, inner)] = value.items()
    if kind == "arrayValue" and isinstance(inner, dict):
        return [_plain(one) for one in inner.get("values") or []]
    if kind == "kvlistValue" and isinstance(inner, dict):
        return _attributes(inner.get("values"))
    return inner


def _from_parts(one: Any) -> list[Record]:
    """The messages of one of OpenTelemetry's: tool results are messages of their own."""
    if not isinstance(one, dict):
        raise Refused("bad_field:messages")
    parts = one.get("parts", [])
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise Refused("bad_field:messages")
    results = [
        {"role": "tool", "tool_call_id": part.get("id"), "content": _as_text(part)}
        for part in parts
        if part.get("type") == "tool_call_response"
    ]
    calls = [part for part in parts if part.get("type") == "tool_call"]
    said = [p for p in parts if p.get("type") not in ("tool_call_response", "tool_call")]
    whole = {"role": one.get("role"), "content": said} | ({"tool_calls": calls} if calls else {})
    return results + ([whole] if said or calls or not results else [])


def _as_text(part: Record) -> Any:
    found = part.get("response", part.get("result"))
    return found if isinstance(found, str | list) else str(found)


def _whole(value: Any) -> int | None:
    """A whole number from 0 on; OTLP writes it as text."""
    text = str(value) if type(value) in (int, str) else ""
    return int(text) if text.isdecimal() and len(text) < 20 else None


def _number(value: Any) -> Any:
    try:
        return (
            float(value)
            if isinstance(value, str) and "." in value
            else (int(value) if isinstance(value, str) else value)
        )
    except ValueError:
        return value
