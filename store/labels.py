"""Labels of requests: one set of names and one form, for the capture and for every log format.

A label comes from a client. It only groups and names, so no record is refused because of one.
"""

import hashlib
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

LABELS = ("conversation_id", "domain", "language", "tenant")
ALIASES = {"conversation": "conversation_id"}
METADATA = (*LABELS, *ALIASES, "target_id", "adapter")
"""What logs read from the metadata of a request; consent is checked before."""
MAX_LABEL = 200
_BROKEN = {"Cc", "Cs", "Zl", "Zp"}  # controls, lone surrogates, line and paragraph ends


def labels(told: Iterable[tuple[Any, Any]]) -> dict[str, str | None]:
    """LABELS from (name, value) pairs. Of several values under one name, the last non-empty counts.

    Names are those of LABELS or ALIASES; "-" counts as "_", because headers are written with "-".
    """
    found: dict[str, str | None] = dict.fromkeys(LABELS)
    for name, value in told:
        label = _label(name) if isinstance(name, str) else None
        if label:
            found[label] = clean(value) or found[label]
    return found


@lru_cache(1024)  # every record has the same names
def _label(name: str) -> str | None:
    name = name.replace("-", "_")
    name = ALIASES.get(name, name)
    return name if name in LABELS else None


def clean(value: Any) -> str | None:
    """A label in NFC, at most MAX_LABEL characters long; None if nothing is left.

    Control characters become U+FFFD. A number becomes its digits; a list or an object is no label.
    A longer label is cut and ends in a digest of the whole, so different labels stay different.
    """
    if value is None or isinstance(value, list | dict):
        return None
    text = str(value).strip()
    if len(text) <= MAX_LABEL and text.isascii() and text.isprintable():
        return text or None  # nothing below would change it
    text = unicodedata.normalize("NFC", text).strip()
    if len(text) > MAX_LABEL:
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
        text = f"{text[: MAX_LABEL - 17]}-{digest}"
    return "".join("\ufffd" if unicodedata.category(c) in _BROKEN else c for c in text) or None
