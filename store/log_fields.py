"""Fields of log records, checked one by one: what comes out fits its column.

A function here returns None for an absent field if its type says so, and raises Refused for a value
that does not fit.
"""

import math
from datetime import UTC, datetime
from typing import Any

import numpy as np

Record = dict[str, Any]
MAX_DETAIL = 100  # characters


class Refused(Exception):
    """A record that is not used; `detail` names what was found instead (a model, a target).

    The reason is a word of ours. The detail comes from a client, so it is cut and made printable.
    """

    def __init__(self, reason: str, detail: object = ""):
        super().__init__(reason)
        self.reason, self.detail = reason, shown(detail)


def shown(value: object) -> str:
    """A value of a log as one line that can be printed and stored, cut after MAX_DETAIL."""
    text = f"a {type(value).__name__}" if isinstance(value, list | dict) else str(value)
    line = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in text[: MAX_DETAIL + 1]
    )
    return line if len(line) <= MAX_DETAIL else line[:MAX_DETAIL] + "..."


def ids(record: Record, name: str, vocab_size: int) -> np.ndarray:
    """Token ids [n] int32, checked against the vocabulary."""
    found = record.get(name)
    if found is None:
        raise Refused("no_token_ids")
    # By exact type, because True is no token id. In C, because every token of every log is checked.
    if not isinstance(found, list) or not set(map(type, found)) <= {int}:
        raise Refused("bad_token_ids")
    if found and not (min(found) >= 0 and max(found) < vocab_size):
        raise Refused("token_outside_vocabulary")
    return np.array(found, np.int32)


def text(record: Record, name: str) -> str | None:
    """A text that Parquet can hold."""
    value = record.get(name)
    if value is None:
        return None
    if not is_text(value):
        raise Refused(f"bad_field:{name}")
    return value


def is_text(value: Any) -> bool:
    """Whether it is a text that Parquet can hold: JSON can carry lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def number(record: Record, name: str) -> float | None:
    """A finite float32."""
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 3e38:
        raise Refused(f"bad_field:{name}")
    if not math.isfinite(value):
        raise Refused(f"bad_field:{name}")
    return float(value)


def integer(record: Record, name: str, bits: int) -> int | None:
    """An integer of at most `bits` bits and a sign."""
    value = record.get(name)
    if value is not None and (type(value) is not int or not -(2**bits) <= value < 2**bits):
        raise Refused(f"bad_field:{name}")
    return value


def flag(record: Record, name: str) -> bool | None:
    """True or false."""
    value = record.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refused(f"bad_field:{name}")
    return value


def names(record: Record, name: str) -> str | None:
    """A list of names as one text, sorted and joined by commas."""
    found = record.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or not all(map(is_text, found)):
        raise Refused(f"bad_field:{name}")
    return ",".join(sorted(found))


def time(record: Record, name: str) -> datetime | None:
    """ISO text with an offset, or epoch seconds, as UTC; None stays None."""
    value = record.get(name)
    if value is None:
        return None
    try:
        if isinstance(value, str):
            found = datetime.fromisoformat(value)
            if found.tzinfo is None:
                raise ValueError("no offset: not a moment")
            return found.astimezone(UTC)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, UTC)
    except (ValueError, OverflowError, OSError):
        pass
    raise Refused(f"bad_field:{name}")
