"""Labels of requests: one set of names and one form, whoever writes them down.

A label is data of a client. It groups and names, so nothing is ever refused because of one.
"""

import hashlib
import unicodedata
from collections.abc import Iterable
from typing import Any

LABELS = ("conversation_id", "domain", "language", "tenant")
ALIASES = {"conversation": "conversation_id"}
MAX_LABEL = 200
_BROKEN = {"Cc", "Cs", "Zl", "Zp"}  # controls, lone surrogates, line and paragraph ends


def labels(told: Iterable[tuple[Any, Any]]) -> dict[str, str | None]:
    """LABELS of (name, value) pairs; of several values under a name the last that says something.

    Names are those of LABELS or ALIASES, with "-" for "_" where a header carries them.
    """
    found: dict[str, str | None] = dict.fromkeys(LABELS)
    for name, value in told:
        if isinstance(name, str):
            name = name.replace("-", "_")
            name = ALIASES.get(name, name)
            if name in found:
                found[name] = clean(value) or found[name]
    return found


def clean(value: Any) -> str | None:
    """A label in NFC, without control characters, at most MAX_LABEL long; None if nothing is left.

    Numbers are their digits, lists and objects no label. A longer one ends in a digest of the
    whole: two that differ stay two.
    """
    if value is None or isinstance(value, list | dict):
        return None
    text = unicodedata.normalize("NFC", str(value)).strip()
    if len(text) > MAX_LABEL:
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
        text = f"{text[: MAX_LABEL - 17]}-{digest}"
    return "".join("\ufffd" if unicodedata.category(c) in _BROKEN else c for c in text) or None
