"""The elements of a JSON array, or of JSON objects over several lines, one after the other.

Only one element is in memory. A file that ends inside an element gives those before it, and the
rest. Where elements are divided by a text with a line break, as in indented files, that text is
looked for: no string of JSON has a line break in it, so one damaged element does not hide the next.
"""

import re
from collections.abc import Iterator
from typing import Protocol

BLOCK = 1 << 20
_PART = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}"]', re.DOTALL)
_OPEN = re.compile(rb"[{\[]")


class Stream(Protocol):
    """What is needed of a file: at most so many bytes, none at its end."""

    def read(self, most: int, /) -> bytes: ...  # noqa: D102


Element = tuple[int, bytes | None, bool]
"""Offset of the first byte, the bytes (None: there are too many), whether the element is whole."""


def elements(stream: Stream, most: int) -> Iterator[Element]:
    """Every element. An array at the top is opened; elements of at most `most` bytes are whole."""
    buffer, offset = stream.read(BLOCK), 0
    start = _first(buffer)
    buffer, offset = buffer[start:], start
    divider = _divider(buffer)
    done = 0
    while True:
        found = _next(buffer, done, divider)
        if found is not None:
            begin, end = found
            yield offset + begin, buffer[begin:end], True
            done = end
            continue
        buffer, offset, done = buffer[done:], offset + done, 0
        if len(buffer) > most:
            begin = _begin(buffer, 0) or 0
            yield offset + begin, None, False
            offset, buffer = _skip(stream, offset, buffer, divider)
            continue
        more = stream.read(max(BLOCK, len(buffer)))
        if not more:
            break
        buffer += more
    yield from _last(buffer, offset)


def _first(head: bytes) -> int:
    """Where the first element may begin: behind the bracket of the array."""
    found = re.match(rb"(?:\xef\xbb\xbf)?\s*(\[)?", head)
    return found.end() if found else 0


def _begin(buffer: bytes, done: int) -> int | None:
    found = _OPEN.search(buffer, done)
    return found.start() if found else None


def _next(buffer: bytes, done: int, divider: bytes | None) -> tuple[int, int] | None:
    """(begin, end) of the next element that is whole in the buffer; None: more is needed."""
    begin = _begin(buffer, done)
    if begin is None:
        return None
    if divider is None:
        end = _end(buffer, begin)
        return None if end is None else (begin, end)
    at = buffer.find(divider, begin)
    return None if at < 0 else (begin, at + divider.index(b"}") + 1)


def _end(buffer: bytes, begin: int) -> int | None:
    """Where the element that begins there ends, by counting brackets outside of strings."""
    depth = 0
    for part in _PART.finditer(buffer, begin):
        byte = buffer[part.start()]
        if byte == 34:
            if part.end() - part.start() == 1:  # a string that goes on behind the buffer
                return None
        elif byte in b"{[":
            depth += 1
        else:
            depth -= 1
            if depth <= 0:
                return part.end()
    return None


def _divider(head: bytes) -> bytes | None:
    """The text from the end of an element to the beginning of the next, if it has a line break and
    does not stand inside the first element.
    """
    begin = _begin(head, 0)
    end = None if begin is None else _end(head, begin)
    following = None if end is None else _begin(head, end)
    if begin is None or end is None or following is None:
        return None
    line = head.rfind(b"\n", begin, end - 1) + 1
    indent = line - 1 if line and not head[line : end - 1].strip() else end - 1
    found = head[indent : following + 1]
    plain = re.fullmatch(rb"\s*\}\s*,?\s*\{", found) and b"\n" in found
    return found if plain and head.find(found, begin) == indent else None


def _skip(stream: Stream, offset: int, buffer: bytes, divider: bytes | None) -> tuple[int, bytes]:
    """(offset, buffer) behind an element that is too large: at the next divider, or at the end."""
    while True:
        at = buffer.find(divider) if divider else -1
        if divider and at >= 0:
            at += divider.index(b"}") + 1
            return offset + at, buffer[at:]
        kept = len(divider) - 1 if divider else 0
        more = stream.read(BLOCK)
        gone = len(buffer) - kept if more else len(buffer)
        offset, buffer = offset + gone, buffer[gone:] + more
        if not more:
            return offset, b""


def _last(buffer: bytes, offset: int) -> Iterator[Element]:
    """What is left at the end of the file: an element in front of the closing bracket, or the
    beginning of one that is cut.
    """
    done = 0
    while (begin := _begin(buffer, done)) is not None:
        end = _end(buffer, begin)
        yield offset + begin, buffer[begin:end], end is not None
        if end is None:
            return
        done = end
