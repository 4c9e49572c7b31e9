"""Whether the owner of a request agreed to be recorded: one rule for the capture and for ingest."""

from typing import Any

YES = {"true", "yes", "1"}


def consents(*said: Any) -> bool:
    """Whether everything that was said is a clear yes; None says nothing.

    A value may hold several answers, as a proxy joins two headers ("false, true"): any part that
    is not a clear yes ("off", "", a misspelling, a list) is a no, and one no wins over every yes.
    Nothing said at all is consent: whoever runs the capture decided to record.
    """
    if any(isinstance(value, list | dict) for value in said):
        return False
    parts = [part for value in said if value is not None for part in str(value).split(",")]
    return all(part.strip().lower() in YES for part in parts)
