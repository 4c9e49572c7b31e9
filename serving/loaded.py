"""What this server process drafts with, as it was loaded.

The process that serves HTTP holds one value: serving.replica changes it after a swap; the capture,
response headers and metrics report it.
"""

import os
import socket
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Loaded:
    """A drafter in a running server. Without a drafter, `version` and `sha256` are empty."""

    version: str  # its number in the registry, or the name of its folder
    sha256: str  # dflash.checkpoint.drafter_sha256 of what was loaded
    swaps: int = 0  # how often this process changed its drafter before

    @property
    def label(self) -> str:
        """As in response headers: `7/0123456789ab`, or `none`."""
        return f"{self.version}/{self.sha256[:12]}" if self.sha256 else "none"


def replica_name() -> str:
    """The name of this server in rows, metrics and status: FLYWHEEL_REPLICA, or its host."""
    return os.environ.get("FLYWHEEL_REPLICA") or socket.gethostname()


def now() -> Loaded:
    """What is loaded now. Two equal answers around a request mean that no swap came between."""
    return _current


def began(version: str, sha256: str) -> Loaded:
    """Say what the server has loaded at its start."""
    global _current
    _current = replace(_current, version=version, sha256=sha256)
    return _current


def swapped(version: str, sha256: str) -> Loaded:
    """Say that this drafter is loaded from now on, or none (two empty texts)."""
    global _current
    _current = replace(_current, version=version, sha256=sha256, swaps=_current.swaps + 1)
    return _current


_current = Loaded(
    os.environ.get("FLYWHEEL_DRAFTER_VERSION", ""), os.environ.get("FLYWHEEL_DRAFTER_SHA256", "")
)
