"""What must not be kept: records whose owner did not agree, and what somebody has redacted.

This is checked before anything else can refuse a record or copy its bytes. store.consent has the
rule for one value. This module knows where a request or a log may state it, for the capture and for
ingest alike.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from store.consent import YES, consents
from store.objects import KEYS, PLACES, TWICE, copies, parsed

# The consent field in lower-case bytes, and its value. After a quoted name: a value as in JSON or
# in a Python dict. If the name is the whole quoted string, also the second element of a pair, or
# the `"value":` of a header in HAR. After a name without quotes: the rest of the line. A name at
# the end of the bytes has no value.
_KEY = re.compile(
    rb"""(?:(?<=["'])(?P<whole>(?:x-flywheel-)?))?consent(?:"""
    rb"""\\*["']\s*(?:$|(?(whole)[:=,}\])]|[:=])\s*(?:\\*["']value\\*["']\s*:\s*)?"""
    rb"""(?:b?\\*["'](?P<text>[^"'\\]*)(?P<end>\\*["'])?|(?P<bare>[^"',}\])\s]*)))"""
    rb"""|\s*(?:$|[:=]\s*(?P<line>[^\r\n]*)))"""
)
_ESCAPE = re.compile(rb"\\u00([2-7][0-9a-fA-F])")
# No repetition can match what the next one matches. Else a line of brackets would backtrack for
# ever.
_MARK = re.compile(
    r"redacted-by-\w|[\[<{*]\s*(?:\w+[ _:-])?REDACTED\s*[\]>}*]"
    r"|[\[<{*]\s*REDACTED(?:[ _:-]+[^\W_]+){1,9}_*\s*[\]>}*]",
    re.IGNORECASE,
)
_FLAG = re.compile(rb"\"redacted\"\s*:\s*true")
_SILENT = {"null", "none"}


def answers(value: Any) -> list[Any]:
    """All that an object says about consent: in its own fields, and in the metadata and headers of
    its request and response. Names match in upper and lower case.

    Headers may be an object, a list of pairs, or a list of {"name": .., "value": ..} as in HAR. A
    text in place of an object counts as a no if it may contain one.
    """
    found: list[Any] = []
    left = [value]
    while left:
        part = left.pop()
        part = parsed(part)
        if isinstance(part, str):
            found += [False] * may_refuse(part.encode("utf-8", "surrogatepass"))
            continue
        for name, inner in _members(part):
            name = _lower(name)
            if name in KEYS:
                found += copies(inner)
            elif name in PLACES:
                left += copies(inner)
    return found


def _members(part: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(part, dict):
        return part.items()
    return _of_list(part) if isinstance(part, list) else ()


def _of_list(part: list[Any]) -> Iterator[tuple[Any, Any]]:
    """(name, value) pairs of headers as a list; what is no pair is searched like headers itself."""
    for one in part:
        if isinstance(one, dict) and isinstance(one.get("name"), str) and "value" in one:
            yield one["name"], one["value"]
        elif isinstance(one, dict) and isinstance(one.get("key"), str):  # OpenTelemetry
            value = one.get("value")
            if isinstance(value, dict) and len(value) == 1:  # the name is that of its type
                value = next(iter(value.values()))
            yield one["key"], value
        elif isinstance(one, list) and len(one) == 2 and isinstance(one[0], str):
            yield one[0], one[1]
        else:
            yield "headers", one


@lru_cache(1024)  # every record has the same keys
def _lower(key: Any) -> str:
    return str(key).lower()


def may_refuse(raw: bytes) -> bool:
    """Whether bytes that cannot be read as a record hold a consent that is not a clear yes.

    A value that is cut off counts as a no, and so does a name without a value. null says nothing.
    In doubt it is a no: then the line is not kept for whoever looks for the damage.
    """
    raw = _unescaped(raw).lower()
    return b"consent" in raw and not all(map(_is_clear, _KEY.finditer(raw)))


def _unescaped(raw: bytes) -> bytes:
    """A line with the ASCII characters that JSON may write as escapes: Go writes < and > so."""
    if b"\\u00" not in raw:
        return raw
    return _ESCAPE.sub(lambda found: bytes([int(found[1], 16)]), raw)


def _is_clear(found: re.Match[bytes]) -> bool:
    if found["text"] is not None:
        return found["end"] is not None and consents(found["text"].decode("utf-8", "replace"))
    if found["line"] is not None:
        line = found["line"].decode("utf-8", "replace").strip()
        return line in _SILENT or consents(line)
    return (found["bare"] or b"").decode("utf-8", "replace") in YES | _SILENT


def marked(raw: bytes) -> bool:
    """Whether the bytes of a line carry a redaction mark. Fast for lines without one."""
    raw = _unescaped(raw)
    if b"edacted" not in raw and b"EDACTED" not in raw:
        return False
    return bool(_FLAG.search(raw) or _MARK.search(raw.decode("utf-8", "replace")))


def redacted(value: dict[str, Any], raw: bytes) -> bool:
    """Whether the prompt or the answer of a request/response pair carries a redaction mark.

    A mark in one of them means that the other, and the token ids of both, should be gone too.
    """
    if not marked(raw):
        return False
    request, response = value.get("request"), value.get("response")
    if not isinstance(request, dict) or not isinstance(response, dict):
        return "v" not in value  # a capture record holds no text: the mark is in a label
    texts = [request.get(name) for name in ("messages", "prompt", "system", "tools", "input")]
    texts += [response.get(name) for name in ("choices", "prompt_text", "output")]
    return bool(_FLAG.search(raw)) or _holds_mark(texts)


def _holds_mark(texts: list[Any]) -> bool:
    """Whether a text somewhere in them, however deep, carries a mark. A name that stands twice with
    two values counts as a mark, because only one of the values is seen here.
    """
    left = [*texts]
    while left:
        part = left.pop()
        if isinstance(part, str) and _MARK.search(part):
            return True
        if isinstance(part, dict):
            if TWICE in part:
                return True
            left += [*part, *part.values()]
        elif isinstance(part, list):
            left += part
    return False
