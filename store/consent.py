"""Whether the owner of a request agreed to be recorded: one rule for the capture and for ingest."""

from typing import Any

YES = {"true", "yes", "1"}


def consents(*said: Any) -> bool:
    """Whether every given value is a clear yes. None means that nothing was said and is ignored.

    A value may hold several answers, because a proxy joins repeated headers ("false, true"). Any
    answer that is not a clear yes ("off", "", a misspelling, a list) is a no, and one no outweighs
    every yes. If nothing was said at all, that is consent: whoever runs the capture decided to
    record.
    """
    if any(isinstance(value, list | dict) for value in said):
        return False
    parts = [part for value in said if value is not None for part in str(value).split(",")]
    return all(part.strip().lower() in YES for part in parts)
