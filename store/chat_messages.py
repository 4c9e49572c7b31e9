"""Messages of text logs in one form, whatever wrote them: which roles, what counts as text, and
which turns an answer of the target can be asked for.

A message here is {"role": system | user | assistant | tool, "content": text} and, where it has
them, "reasoning_content", "tool_calls" (OpenAI's form, arguments as JSON text), "tool_call_id",
"name".
"""

import json
from typing import Any

from store.log_fields import Refused, is_text
from store.objects import TWICE, parsed

ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Role or `from` of a log -> role of a chat template. Any other is refused."""
TEXT_PARTS = {"text", "input_text", "output_text"}
AFTER = {
    None: {"system", "user"},
    "system": {"system", "user"},
    "user": {"assistant"},
    "assistant": {"user"},
    "tool": {"tool", "assistant"},
}
"""Role -> roles that may follow. After an assistant's tool calls, only tools may."""

MORE = frozenset({"reasoning", "reasoning_content", "tool_calls", "function_call", TWICE})
"""Names that make a message more than a role and a text."""

Message = dict[str, Any]


def messages_of(found: Any) -> list[Message]:
    """The messages of a list in any of the forms that logs have. Raises Refused for what is no list
    of messages, for a role that is not known, and for content that is not text.
    """
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise Refused("bad_field:messages")
    return [_message(one) for one in found]


def usable(found: list[Message]) -> tuple[list[Message], bool]:
    """The messages up to the first that cannot follow the ones before it (an empty one, or a role
    that is repeated), and whether any was left out. Answers before the first question are left out.
    """
    start = next((i for i, one in enumerate(found) if one["role"] in AFTER[None]), len(found))
    kept: list[Message] = []
    for one in found[start:]:
        last = kept[-1] if kept else {"role": None}
        follows = {"tool"} if last.get("tool_calls") else AFTER[last["role"]]
        if one["role"] not in follows or _is_empty(one):
            break
        kept.append(one)
    return kept, len(kept) < len(found)


def asked_at(kept: list[Message]) -> list[int]:
    """Every n for which the first n messages ask for an answer: the places of the answers in a
    conversation, each once, and its end if it ends in a question.
    """
    roles = [one["role"] for one in kept]
    return [
        n
        for n in range(1, len(kept) + 1)
        if roles[n - 1] in ("user", "tool") and roles[n : n + 1] in (["assistant"], [])
    ]


def _is_empty(one: Message) -> bool:
    return not one["content"].strip() and not one.get("tool_calls") and one["role"] != "tool"


def _message(raw: dict[Any, Any]) -> Message:
    told = raw.get("role", raw.get("from"))
    role = ROLES.get(told) if isinstance(told, str) else None
    said = raw.get("content", raw.get("value", raw.get("text")))
    if type(said) is str and role in ("user", "assistant") and MORE.isdisjoint(raw):
        return {"role": role, "content": said}  # nearly all of them
    if TWICE in raw:
        raise Refused("duplicate_field", raw[TWICE][0])
    if role is None:
        raise Refused("unknown_role", told)
    content, thought = _content(said)
    found: Message = {"role": role, "content": content}
    thought = raw.get("reasoning") or raw.get("reasoning_content") or thought
    if thought and is_text(thought):
        found["reasoning_content"] = thought
    if role == "assistant" and (calls := parsed(raw.get("tool_calls")) or raw.get("function_call")):
        found["tool_calls"] = _calls(calls)
    if role == "tool":
        found |= {n: raw[n] for n in ("tool_call_id", "name") if is_text(raw.get(n))}
    return found


def _content(value: Any) -> tuple[str, str]:
    """(text, thoughts) of a message's content. Raises Refused for pictures, sound and files."""
    if value is None:
        return "", ""
    if isinstance(value, str):
        return value, ""
    if not isinstance(value, list):
        raise Refused("bad_field:content")
    texts, thoughts = [], []
    for part in value:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        part = part if isinstance(part, dict) else {}
        kind = part.get("type", "a part without a type")
        kind = kind if isinstance(kind, str) else "a part of no known type"
        inner = part.get("text", part.get("content", part.get("thinking")))
        if kind in ("thinking", "reasoning"):
            thoughts.append(inner)
        elif kind in TEXT_PARTS:
            texts.append(inner)
        else:
            raise Refused("not_text", kind)
    if not all(map(is_text, texts + thoughts)):
        raise Refused("bad_text")
    return "".join(texts), "".join(thoughts)


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form; those of Langfuse and older logs have no "function" object."""
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        call = parsed(call)
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not is_text(name) or not isinstance(function, dict):
            raise Refused("bad_field:tool_calls")
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not is_text(arguments):
            raise Refused("bad_text")
        one = {"type": "function", "function": {"name": name, "arguments": arguments}}
        found.append(one | ({"id": call["id"]} if is_text(call.get("id")) else {}))
    return found
