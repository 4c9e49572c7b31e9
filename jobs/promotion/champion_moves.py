"""The only code that changes the champion, and the records of it."""

from typing import Any

from jobs.base.config import Config
from jobs.base.console import console
from jobs.registry.alias_lock import who
from jobs.registry.versions import CHAMPION, PREVIOUS, Registry, Version
from store import promotions
from store.ids import drafter_version

Named = tuple[str | None, str | None]
"""Number of a version, and name of its drafter."""


def move(
    cfg: Config,
    registry: Registry,
    action: str,
    champion: Version | None,
    version: Version,
    reason: str,
    evidence: Any,
) -> None:
    """Change the champion: set `previous`, set `champion`, write the record. Needs the lease. If it
    is interrupted before the record, the next promotion or rollback writes that
    (`complete_history`).
    """
    if champion is not None:
        registry.set_alias(PREVIOUS, champion)
    registry.set_alias(CHAMPION, version)
    record_decision(cfg, action, champion, version.number, version.sha256, reason, evidence)


def complete_history(cfg: Config, champion: Version | None) -> None:
    """Write a record for the present champion if the latest move has none. Needs the lease."""
    moves = [r for r in promotions.read(cfg.path("promotions")) if r["action"] != "refuse"]
    known = moves[-1]["to_version"] if moves else None
    if champion is None or champion.number == known:
        return
    reason = "the alias had moved without a record: an interrupted promotion, or set by hand"
    before = moves[-1]["to_drafter"] if moves else None
    version, drafter = champion.number, drafter_version(champion.sha256)
    _append(cfg, "promote", (known, before), (version, drafter), reason, None)
    console.print(f"note: champion {champion.number}: {reason}; recorded now")


def record_decision(
    cfg: Config,
    action: str,
    champion: Version | None,
    number: str | None,
    sha256: str,
    reason: str,
    evidence: Any,
) -> None:
    """Record a decision about the drafter `sha256`; `number`: its version, None if it has none."""
    before = (champion.number, drafter_version(champion.sha256)) if champion else (None, None)
    _append(cfg, action, before, (number, drafter_version(sha256)), reason, evidence)


def _append(
    cfg: Config, action: str, before: Named, after: Named, reason: str, evidence: Any
) -> None:
    record = {
        "action": action,
        "who": who(),
        "model": cfg.mlflow.model,
        "from_version": before[0],
        "from_drafter": before[1],
        "to_version": after[0],
        "to_drafter": after[1],
        "reason": reason,
        "evidence": evidence,
    }
    promotions.append(cfg.path("promotions"), record)
