"""JSON objects of requests and logs, decoded so that a name that stands twice is noticed.

One decoder for the capture and for ingest, so that both see the same values.
"""

import json
from typing import Any

import msgspec

KEYS = frozenset({"consent", "x-flywheel-consent"})
"""Names, in lower case, whose value says whether the owner agrees to be recorded."""
PLACES = frozenset(
    {"metadata", "headers", "extra_headers", "extra_body", "request", "response", "rawheaders"}
    | {"req", "resp", "request_body", "response_body", "body", "proxy_server_request"}
    | {"model_parameters", "modelparameters", "requester_metadata"}
    | {"attributes", "resource", "resourcespans", "scopespans", "spans"}  # of OpenTelemetry
)
"""Names, in lower case, of members that may hold one of KEYS."""
TWICE = object()  # the key under which an object lists its names that have two values


class Copies(list):
    """The values of a name of KEYS or PLACES that stands in one object more than once."""


def decode(text: bytes) -> Any:
    """A JSON value. Raises ValueError, or RecursionError for one that is nested too deep.

    The fast decoder keeps the last of two equal names. Then there are fewer quotes in what it read
    than in the text, and Python's slow one reads it again.
    """
    if b"\\u0022" not in text:  # a quote by another name
        try:
            value = msgspec.json.decode(text)
            if msgspec.json.encode(value).count(b'"') == text.count(b'"'):
                return value
        except (ValueError, RecursionError, OverflowError):  # NaN, a lone surrogate, no JSON ...
            pass
    return _slow(text)


def _slow(text: bytes) -> Any:
    return _DECODER.decode(text.decode("utf-8", "surrogatepass"))


def parsed(value: Any) -> Any:
    """A value that a log may hold as JSON in a text: an object or a list, if the text is one."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        found = decode(value.encode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, dict | list) else value


def copies(value: Any) -> list[Any]:
    """All values that stand under one name."""
    return value if isinstance(value, Copies) else [value]


def _pairs(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
    """A JSON object. A name that stands twice with two values does not silently get the last."""
    found: dict[Any, Any] = dict(pairs)
    if len(found) == len(pairs):
        return found
    for key in dict(pairs):
        values = [value for name, value in pairs if name == key]
        if any(value != values[0] for value in values):
            name = key.lower()
            if name in KEYS or name in PLACES:
                found[key] = Copies(values)
            if name not in KEYS:  # every answer about consent counts, so none is in doubt
                found.setdefault(TWICE, []).append(key)
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs)
