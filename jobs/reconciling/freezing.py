"""The freeze switch: an object in the work folder, which stops every roll-out of it."""

from datetime import UTC, datetime
from typing import Any

from jobs.base.config import Config
from store.lease import who
from store.place import read_json, write_json

NAME = "freeze.json"


def frozen(cfg: Config) -> dict[str, Any] | None:
    """Who froze the fleet, when and why; None if nobody has."""
    return read_json(cfg.place(), NAME, ["who", "when", "why"], "remove it, or freeze again")


def freeze(cfg: Config, why: str) -> dict[str, Any]:
    """From now on no roll-out changes a replica or the registry."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return write_json(cfg.place(), NAME, {"who": who(), "when": now, "why": why})


def thaw(cfg: Config) -> None:
    """Roll-outs go on."""
    cfg.place().delete([NAME])


def told(found: dict[str, Any]) -> str:
    """A freeze as one line."""
    return (
        f"frozen by {found['who']} at {found['when']}: {found['why']}; nothing is changed "
        "(rollout.freeze=off ends it)"
    )
