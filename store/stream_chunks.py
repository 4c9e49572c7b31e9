"""A streamed answer put together from its chunks, in the form of one that was not streamed."""

from collections.abc import Iterable
from typing import Any

from store.objects import parsed

Chunk = dict[str, Any]
IDS = ("token_ids", "prompt_token_ids")


def chunks_of(value: Any) -> list[Chunk] | None:
    """The chunks of a response that is a list of them, or the text of an event stream ("data: .."
    lines); None if it is neither.
    """
    if isinstance(value, str) and value.lstrip().startswith("data:"):
        lines = (line.strip() for line in value.splitlines())
        value = [parsed(line[5:].strip()) for line in lines if line.startswith("data:")]
        value = [one for one in value if one != "[DONE]"]
    else:
        value = [parsed(one) for one in value] if isinstance(value, list) else None
    if not value or not all(isinstance(one, dict) and "choices" in one for one in value):
        return None
    return value


def joined(chunks: list[Chunk]) -> dict[str, Any]:
    """The response. A choice that got no finish reason has None: it was cut off."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        told = {k: v for k, v in chunk.items() if k != "choices" and v is not None}
        whole = told | whole if "usage" not in told else whole | told
        for part in _dicts(chunk["choices"]):
            number = part.get("index")
            index = number if isinstance(number, int) else 0
            _add(choices.setdefault(index, {"index": index, "message": {}}), part)
    return whole | {"choices": [choices[index] for index in sorted(choices)]}


def _add(choice: dict[str, Any], part: Chunk) -> None:
    """Put one chunk's share of a choice behind those before it."""
    more = part.get("provider_specific_fields")
    for source in (part, more if isinstance(more, dict) else {}):
        for name in IDS:
            if isinstance(source.get(name), list):
                choice[name] = choice.get(name, []) + source[name]
    choice["finish_reason"] = part.get("finish_reason") or choice.get("finish_reason")
    if isinstance(part.get("text"), str):
        choice["text"] = choice.get("text", "") + part["text"]
    delta, message = part.get("delta"), choice["message"]
    if not isinstance(delta, dict):
        return
    message.setdefault("role", "assistant")
    for name in ("content", "reasoning", "reasoning_content"):
        if isinstance(delta.get(name), str):
            message[name] = message.get(name, "") + delta[name]
    for call in _dicts(delta.get("tool_calls")):
        _add_call(message.setdefault("tool_calls", []), call)


def _add_call(calls: list[dict[str, Any]], call: Chunk) -> None:
    index = call.get("index") if isinstance(call.get("index"), int) else len(calls)
    known = next((one for one in calls if one["index"] == index), None)
    if known is None:
        known = {"index": index, "function": {"name": "", "arguments": ""}}
        calls.append(known)
    known["id"] = known.get("id") or call.get("id")
    function = call.get("function")
    for name in ("name", "arguments"):
        piece = function.get(name) if isinstance(function, dict) else None
        known["function"][name] += piece if isinstance(piece, str) else ""


def _dicts(value: Any) -> Iterable[Chunk]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
