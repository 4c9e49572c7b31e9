"""Rows of TEXTS: what was said in conversations of which no token ids are known."""

import hashlib
from typing import Any

import msgspec

from store import log_fields
from store.chat_messages import Message, asked_at, messages_of, usable
from store.labels import ALIASES, LABELS, labels
from store.log_fields import Refused

CHARACTERS = 4
"""Of a token, about, where a log counts none. Only budgets go by it."""
NAMES = (*ALIASES, *LABELS)
FAILED = ("error", "content_filter")
Row = dict[str, Any]


def text_row(record: Row, source: str, consent: bool | None, default_domain: str) -> Row:
    """TEXTS columns but `log`, and two that are none: `dropped`, names of fields and turns that
    were of no use, and `counted_tokens`, the log's own count of the only answer.

    Raises Refused for messages that cannot be read, and where no turn asks for an answer.
    """
    found, answers, cut = _turns(record)
    tools = record.get("tools") or None
    kept = _encoded(found, tools)
    name = hashlib.sha256(b"\n".join([*kept, str(answers).encode()])).hexdigest()[:32]
    dropped = ["turns after one that is empty or repeats a role"] if cut else []
    dropped += [label for label in LABELS if isinstance(record.get(label), list | dict)]
    named = labels([(label, record[label]) for label in NAMES if record.get(label) is not None])
    counted = record.get("completion_tokens")
    counted = counted if type(counted) is int and counted > 0 else None
    said = sum(len(found[n]["content"]) for n in answers if n < len(found))

    def field(name: str, read: Any, *more: Any) -> Any:
        if record.get(name) is None:
            return None
        try:
            return read(record, name, *more)
        except Refused:
            dropped.append(name)
            return None

    return {
        "text_id": name,
        "conversation_id": named["conversation_id"]
        or (f"text-{name}" if record["turns"] == "all" else None),
        "domain": named["domain"] or default_domain,
        "language": named["language"],
        "tenant": named["tenant"],
        "source": source,
        "captured_at": field("captured_at", log_fields.time),
        "consent": consent,
        "request_id": field("request_id", log_fields.text),
        "model": field("model", log_fields.text),
        "thinking": field("thinking", log_fields.flag),
        "temperature": field("temperature", log_fields.number),
        "top_p": field("top_p", log_fields.number),
        "top_k": field("top_k", log_fields.integer, 31),
        "seed": field("seed", log_fields.integer, 63),
        "finish_reason": field("finish_reason", log_fields.text),
        "messages": kept[0].decode(),
        "tools": kept[1].decode() if tools else None,
        "answers": answers,
        "answer_tokens": counted or said // CHARACTERS + 1,
        "repeat_count": 1,
        "dropped": dropped,
        "counted_tokens": counted if len(answers) == 1 else None,
    }


def _turns(record: Row) -> tuple[list[Message], list[int], bool]:
    """The messages, where answers are asked for, and whether messages were left out."""
    if record.get("finish_reason") in FAILED:
        raise Refused(f"finish_{record['finish_reason']}")
    if record.get("adapter") is not None:
        raise Refused("adapter", record["adapter"])
    found, cut = usable(messages_of(record["messages"]))
    answers = asked_at(found)
    if record["turns"] == "last":
        answers = answers[-1:] if not cut and answers else []
    if not answers:
        raise Refused("no_answer")
    return found, answers, cut


def _encoded(messages: list[Message], tools: Any) -> list[bytes]:
    """Both as JSON; nothing for no tools."""
    try:
        return [msgspec.json.encode(messages), msgspec.json.encode(tools) if tools else b""]
    except UnicodeEncodeError:
        raise Refused("bad_text") from None
    except TypeError:  # a name that stands twice
        raise Refused("duplicate_field", "tools") from None
