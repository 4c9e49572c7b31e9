"""One reader per log format: from an object of a log to records in one form.

A record is a dictionary with the names of the capture format, and of these what the log has:

  served   prompt_ids, output_ids: token ids, which are the truth
  text     messages (store/chat_messages.py reads them), turns ("all": every answer in them counts;
           "last": only the last, because the log has the earlier ones as records of their own),
           tools, completion_tokens (as the log counts them)
  both     request_id, captured_at, model, asked_model, finish_reason, temperature, top_p, top_k,
           seed, thinking, shaped, and the labels of store/labels.py

Which field of which format goes where: docs/how-to/log-formats.md.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from store import span_records
from store.labels import METADATA
from store.log_fields import Refused
from store.objects import TWICE, parsed
from store.shaped_answers import SAMPLER, shaped_by
from store.stream_chunks import chunks_of, joined

Record = dict[str, Any]
REQUEST = ("request", "req", "request_body")
RESPONSE = ("response", "resp", "response_body")
GENERATIONS = {"completion", "acompletion", "text_completion", "atext_completion"}


def read_records(value: Record) -> tuple[str, list[Record]]:
    """(name of the format, its records) of one object. Raises Refused if no format fits, or for
    what this one says of the whole object.
    """
    _check_once(value)
    for name, (is_one, read) in FORMATS.items():
        if is_one(value):
            return name, read(value)
    raise Refused("unknown_format")


def recognised(value: Any) -> str | None:
    """The name of an object's format, whatever is in its fields; None if it has none."""
    if not isinstance(value, dict):
        return None
    return next((name for name, (is_one, _) in FORMATS.items() if is_one(value)), None)


def _capture(value: Record) -> list[Record]:
    if value["v"] != 1:
        raise Refused("unknown_version")
    return [value]


def _pair(value: Record) -> list[Record]:
    request, response = (
        parsed(next((value[name] for name in names if name in value), None))
        for names in (REQUEST, RESPONSE)
    )
    request = request.get("body", request) if isinstance(request, dict) else request
    if isinstance(response, dict) and "choices" not in response:
        response = response.get("body", response)
    chunks = chunks_of(value.get("chunks", response))
    response = joined(chunks) if chunks else response
    if not isinstance(request, dict) or not isinstance(response, dict):
        raise Refused("unknown_format")
    return from_openai(request, response)


def from_openai(request: Record, response: Record) -> list[Record]:
    """A record of each choice of a request and its answer in OpenAI's form."""
    _check_once(request, response)
    choices = response.get("choices")
    if response.get("error") and not choices:
        raise Refused("finish_error")
    if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
        raise Refused("unknown_format")
    if not choices:
        raise Refused("no_token_ids")
    metadata = request.get("metadata") or {}
    template = request.get("chat_template_kwargs") or {}
    if not isinstance(metadata, dict) or not isinstance(template, dict):
        raise Refused("bad_field:metadata")
    _check_once(metadata, template, *choices)
    usage = response.get("usage")
    counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
    shared = {name: request.get(name) for name in SAMPLER}
    shared |= {name: metadata.get(name) for name in METADATA}
    shared |= {
        "shaped": shaped_by(request, {}),
        "request_id": response.get("id"),
        "captured_at": response.get("created"),
        "thinking": template.get("enable_thinking"),
        "model": response.get("model") or request.get("model"),
        "asked_model": request.get("model"),
        "completion_tokens": counted if len(choices) == 1 else None,
        "turns": "last",
        "tools": request.get("tools"),
    }
    return [shared | _choice(request, response, choice) for choice in choices]


def _choice(request: Record, response: Record, choice: Record) -> Record:
    """The prompt and answer of a choice: its token ids where there are any, else its messages."""
    more = choice.get("provider_specific_fields")
    more = more if isinstance(more, dict) else {}
    prompt = response.get("prompt_token_ids") or choice.get("prompt_token_ids")
    output = choice.get("token_ids") or more.get("token_ids")
    found = {
        "prompt_ids": prompt or more.get("prompt_token_ids"),
        "output_ids": output,
        "finish_reason": choice.get("finish_reason"),
    }
    message, asked = choice.get("message"), request.get("messages")
    if found["prompt_ids"] is None and output is None:
        if asked is None and isinstance(choice.get("text"), str):
            raise Refused("raw_prompt")
        if isinstance(message, dict) and isinstance(asked, list):
            found["messages"] = [*asked, {"role": "assistant"} | message]
    return found


def _litellm(value: Record) -> list[Record]:
    """A row of LiteLLM's spend logs, or the payload of its callbacks."""
    if str(value.get("call_type")) not in GENERATIONS:
        raise Refused("not_generation", value.get("call_type"))
    if str(value.get("cache_hit")).lower() == "true":
        raise Refused("cache_hit")
    if value.get("status") == "failure":
        raise Refused("finish_error")
    metadata, response = parsed(value.get("metadata")), parsed(value.get("response"))
    metadata = metadata if isinstance(metadata, dict) else {}
    if not isinstance(response, dict):
        response = {"choices": [{"message": {"content": response}}]} if response else {}
    messages, asked = parsed(value.get("messages")), parsed(value.get("model_parameters"))
    if isinstance(messages, str) and messages:
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, dict):
        messages = messages.get("messages")
    if not messages and not response.get("choices"):
        raise Refused("no_content")
    request = (asked if isinstance(asked, dict) else {}) | {"messages": messages}
    tenant = metadata.get("user_api_key_team_id") or metadata.get("team_id")
    labels = {"conversation_id": value.get("trace_id"), "tenant": tenant} | {
        name: metadata[name] for name in METADATA if metadata.get(name)
    }
    usage = {"completion_tokens": value.get("completion_tokens") or None}
    return [
        record
        | labels
        | {
            "request_id": value.get("request_id") or value.get("id"),
            "captured_at": _utc(value.get("startTime")),
            "model": record["model"] or value.get("model"),
            "asked_model": None,  # a name of the gateway's own
        }
        for record in from_openai(request, {"usage": usage} | response)
    ]


def _langfuse(value: Record) -> list[Record]:
    """An observation of a Langfuse export; names of the API (camelCase) too."""

    def of(snake: str) -> Any:
        first, *rest = snake.split("_")
        return value.get(snake, value.get(first + "".join(map(str.title, rest))))

    if str(value.get("type")).upper() != "GENERATION":
        raise Refused("not_generation", value.get("type"))
    if value.get("level") == "ERROR":
        raise Refused("finish_error")
    asked, answer = parsed(value.get("input")), parsed(value.get("output"))
    if not asked or not answer:
        raise Refused("no_content")
    request = asked if isinstance(asked, dict) and "messages" in asked else {"messages": asked}
    if not isinstance(request["messages"], list):
        request = request | {"messages": [_said("user", request["messages"])]}
    answer = answer[-1] if isinstance(answer, list) and answer else answer
    if not (isinstance(answer, dict) and "choices" in answer):
        answer = {"choices": [{"message": _said("assistant", answer)}]}
    parameters = parsed(of("model_parameters"))
    usage, metadata = parsed(of("usage_details")), parsed(value.get("metadata"))
    counted = usage.get("output") if isinstance(usage, dict) else None
    labels = metadata if isinstance(metadata, dict) else {}
    request = (parameters if isinstance(parameters, dict) else {}) | request
    tools = parsed(of("tool_definitions"))
    conversation = of("session_id") or of("trace_id")
    return [
        record
        | {name: labels[name] for name in METADATA if labels.get(name)}
        | {
            "conversation_id": labels.get("conversation_id") or conversation,
            "request_id": value.get("id"),
            "captured_at": _utc(of("start_time")),
            "model": of("provided_model_name") or value.get("model"),
            "asked_model": None,
            "completion_tokens": counted or None,
            "tools": record["tools"] or tools or None,
        }
        for record in from_openai(request, answer)
    ]


def _said(role: str, what: Any) -> Record:
    return {"role": role} | what if isinstance(what, dict) else {"role": role, "content": what}


def _sharegpt(value: Record) -> list[Record]:
    """Long conversations stand in several records there: NAME_0, NAME_1 ... of one conversation."""
    name = value.get("id")
    head, found, number = name.rpartition("_") if isinstance(name, str) else ("", "", "")
    label = head if found and number.isdigit() else name
    system = value.get("system")
    start = [{"from": "system", "value": system}] if system else []
    turns = parsed(value["conversations"])
    return [
        _chat(value, start + turns if isinstance(turns, list) else turns)
        | {"conversation_id": value.get("conversation_id") or label, "request_id": name}
    ]


def _conversation(value: Record) -> list[Record]:
    """WildChat and LMSYS: the turns under `conversation`."""
    name = value.get("conversation_hash") or value.get("conversation_id")
    return [_chat(value, parsed(value["conversation"])) | {"conversation_id": name}]


def _messages(value: Record) -> list[Record]:
    return [_chat(value, parsed(value["messages"]))]


def _prompt(value: Record) -> list[Record]:
    asked = parsed(value["prompt"])
    answer = parsed(next(value[n] for n in ("completion", "response") if n in value))
    asked = asked if isinstance(asked, list) else [_said("user", asked)]
    answer = answer if isinstance(answer, list) else [_said("assistant", answer)]
    system = value.get("system") or value.get("system_prompt")
    return [_chat(value, [*([_said("system", system)] if system else []), *asked, *answer])]


def _chat(value: Record, messages: Any) -> Record:
    """What all plain conversations may have beside their messages."""
    metadata = parsed(value.get("metadata"))
    metadata = metadata if isinstance(metadata, dict) else {}
    template = value.get("chat_template_kwargs")
    found = {name: value.get(name) for name in (*SAMPLER, "model", "finish_reason")}
    found |= {n: value.get(n) or metadata.get(n) for n in METADATA}
    return found | {
        "messages": messages,
        "turns": "all",
        "tools": parsed(value.get("tools")) or None,
        "request_id": value.get("id"),
        "captured_at": _utc(next((value[n] for n in TIMES if value.get(n)), None)),
        "thinking": template.get("enable_thinking") if isinstance(template, dict) else None,
    }


TIMES = ("captured_at", "timestamp", "created", "created_at")


def _utc(value: Any) -> Any:
    """A time that its format has in UTC, with or without saying so."""
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).isoformat()
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return value
    return found.replace(tzinfo=UTC).isoformat() if found and not found.tzinfo else value


def _check_once(*objects: dict[Any, Any]) -> None:
    for found in objects:
        if TWICE in found:
            raise Refused("duplicate_field", found[TWICE][0])


def _has(*names: str) -> Callable[[Record], bool]:
    return lambda value: all(name in value for name in names)


def _any(*names: str) -> Callable[[Record], bool]:
    return lambda value: any(name in value for name in names)


def _is_pair(value: Record) -> bool:
    return _any(*REQUEST)(value) and _any(*RESPONSE, "chunks")(value)


FORMATS: dict[str, tuple[Callable[[Record], bool], Callable[[Record], list[Record]]]] = {
    "capture": (_has("v"), _capture),
    "openai": (_is_pair, _pair),
    "litellm": (_has("call_type", "startTime"), _litellm),
    "langfuse": (
        lambda value: _has("type", "input", "output")(value) and _any("trace_id", "traceId")(value),
        _langfuse,
    ),
    "opentelemetry": (span_records.is_span, span_records.read),
    "sharegpt": (_has("conversations"), _sharegpt),
    "conversation": (_has("conversation"), _conversation),
    "messages": (_has("messages"), _messages),
    "prompt": (
        lambda value: "prompt" in value and _any("completion", "response")(value),
        _prompt,
    ),
}
"""Format -> (whether an object is of it, its reader). The first that fits counts."""
