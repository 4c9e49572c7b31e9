"""What must not be kept: records whose owner did not agree, and what somebody has redacted.

Looked at before anything else can refuse a record or copy its bytes. The rule for one value is
store.consent; here is where a log may say it.
"""

import json
import re
from functools import lru_cache
from typing import Any

from store.consent import consents

KEYS = frozenset({"consent", "x-flywheel-consent"})
_PLACES = frozenset({"metadata", "headers", "extra_body", "request", "response"})
_KEY = re.compile(
    rb"""consent\\*"\s*(?:$|:\s*(?:\\*"(?P<text>[^"\\]*)(?P<end>\\*")?|(?P<bare>[^",}\]\s]*)))""",
    re.IGNORECASE,
)
_ESCAPE = re.compile(rb"\\u00([2-7][0-9a-fA-F])")
_MARK = re.compile(
    r"redacted-by-\w|[\[<{*]+\s*(?:\w+[ _:-])?REDACTED\s*[\]>}*]+"
    r"|[\[<{*]+\s*REDACTED(?:[ _:-]+\w+){1,3}\s*[\]>}*]+",
    re.IGNORECASE,
)
_FLAG = re.compile(rb"\"redacted\"\s*:\s*true")


class Copies(list):
    """The values of a key that stands in one object more than once."""


def answers(value: dict[str, Any]) -> list[Any]:
    """All that a line says about consent: its own fields, and those of its request's and response's
    metadata and headers, under any spelling of the key.
    """
    found = []
    for key, part in value.items():
        name = _lower(key)
        if name in KEYS:
            found += part if isinstance(part, Copies) else [part]
        elif name in _PLACES and isinstance(part, dict):
            found += answers(part)
    return found


@lru_cache(1024)  # every record has the same keys
def _lower(key: Any) -> str:
    return str(key).lower()


def may_refuse(raw: bytes) -> bool:
    """Whether bytes that cannot be read as a record hold a consent that is no clear yes.

    A value that is cut counts as a no, and so does a key without one. null says nothing.
    """
    if b"\\u00" in raw:  # a key may be written in escapes
        raw = _ESCAPE.sub(lambda found: bytes([int(found[1], 16)]), raw)
    return not all(map(_is_clear, _KEY.finditer(raw)))


def _is_clear(found: re.Match[bytes]) -> bool:
    if found["text"] is not None:
        return found["end"] is not None and consents(found["text"].decode("utf-8", "replace"))
    return found["bare"] in (b"null", b"true", b"1")


def marked(raw: bytes) -> bool:
    """Whether the bytes of a line carry a redaction mark. Fast where they do not."""
    if b"edacted" not in raw and b"EDACTED" not in raw:
        return False
    return bool(_FLAG.search(raw) or _MARK.search(raw.decode("utf-8", "replace")))


def redacted(value: dict[str, Any], raw: bytes) -> bool:
    """Whether the prompt or the answer of a request/response pair carries a redaction mark.

    A mark in one of them says that the other, and the ids of both, should be gone, too.
    """
    if not marked(raw):
        return False
    request, response = value.get("request"), value.get("response")
    if not isinstance(request, dict) or not isinstance(response, dict):
        return "v" not in value  # a capture record holds no text: the mark is in a label
    texts = [request.get("messages"), request.get("prompt"), response.get("choices")]
    return bool(_FLAG.search(raw)) or any(
        _MARK.search(json.dumps(text)) for text in texts if text is not None
    )
