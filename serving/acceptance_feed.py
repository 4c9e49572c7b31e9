"""Placeholder until the branch `served` is merged."""

from typing import Any


def read(after: int) -> dict[str, Any]:
    return {"rows": [], "next": after}
