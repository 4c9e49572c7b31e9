"""Rows of TEXTS: what was said in conversations of which no token ids are known."""

import hashlib
from typing import Any

import msgspec

from store import log_fields
from store.chat_messages import asked_at, messages_of, usable
from store.labels import ALIASES, LABELS, labels
from store.log_fields import Refused

CHARACTERS = 4
"""Of a token, about, where a log counts none. Only budgets go by it."""
NAMES = (*ALIASES, *LABELS)
FAILED = ("error", "content_filter")
Row = dict[str, Any]


def text_row(record: Row, source: str, consent: bool | None, default_domain: str) -> Row:
    """TEXTS columns but `log`, and three that are none: `dropped`, names of fields and turns that
    were of no use, `counted_tokens`, the log's own count of the only answer, and `model`.

    Raises Refused for messages that cannot be read, and where no turn asks for an answer.
    """
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
    tools = record.get("tools") or None
    try:
        kept = [msgspec.json.encode(one) for one in (found, tools)]
    except UnicodeEncodeError:
        raise Refused("bad_text") from None
    except TypeError:  # a name that stands twice
        raise Refused("duplicate_field", "tools") from None
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
