"""The only code that changes the champion, and the records of it.

All of it is done under a lease. Records are fenced: once a later holder has begun, an earlier one
can add none (store/promotions.py). The registry is not, since MLflow has no compare-and-set: the
lease is checked right before each change of it (jobs/registry/versions.py). A process that is
suspended between that check and the call, for longer than its lease, may move an alias late. It
cannot record that, and the next promotion or rollback finds the alias where the latest record did
not put it (`complete_history`).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from jobs.base.config import Config
from jobs.base.console import console
from jobs.registry.versions import CHAMPION, PREVIOUS, Registry, Version
from store import promotions
from store.ids import drafter_version
from store.lease import lease, who

Named = tuple[str | None, str | None]
"""Number of a version, and name of its drafter."""


@contextmanager
def promoting(cfg: Config) -> Iterator["Moves"]:
    """Be the only process, on any host, that moves aliases of this work folder. Raises ValueError
    naming the other one if it does not end.
    """
    with ExitStack() as stack:
        try:
            held = stack.enter_context(lease(cfg.place("leases", "promotion")))
        except ValueError as error:
            raise ValueError(f"another promotion is running: {error}") from error
        decisions = promotions.Decisions(cfg.table("promotions"), held)
        yield Moves(cfg, Registry(cfg, held), decisions)


@dataclass(frozen=True)
class Moves:
    """Changes of the champion under a lease. Each raises Lost if the lease has ended."""

    cfg: Config
    registry: Registry
    decisions: promotions.Decisions

    def move(
        self,
        action: str,
        champion: Version | None,
        version: Version,
        reason: str,
        evidence: Any,
    ) -> None:
        """Change the champion: set `previous`, set `champion`, write the record. If it is
        interrupted before the record, the next promotion or rollback writes that
        (`complete_history`).
        """
        if champion is not None:
            self.registry.set_alias(PREVIOUS, champion)
        self.registry.set_alias(CHAMPION, version)
        self.record(action, champion, version.number, version.sha256, reason, evidence)

    def complete_history(self, champion: Version | None) -> None:
        """Write a record for the present champion if the latest move has none."""
        records = promotions.read(self.cfg.table("promotions"))
        moves = [r for r in records if r["action"] in promotions.MOVES]
        known = moves[-1]["to_version"] if moves else None
        if champion is None or champion.number == known:
            return
        reason = (
            "the alias had moved without a record: an interrupted or late promotion, or set by hand"
        )
        before = moves[-1]["to_drafter"] if moves else None
        version, drafter = champion.number, drafter_version(champion.sha256)
        self.add("promote", (known, before), (version, drafter), reason, None)
        console.print(f"note: champion {champion.number}: {reason}; recorded now")

    def record(
        self,
        action: str,
        champion: Version | None,
        number: str | None,
        sha256: str,
        reason: str,
        evidence: Any,
    ) -> None:
        """Record a decision about the drafter `sha256`; `number`: its version, None without one."""
        before = (champion.number, drafter_version(champion.sha256)) if champion else (None, None)
        self.add(action, before, (number, drafter_version(sha256)), reason, evidence)

    def add(
        self, action: str, before: Named, after: Named, reason: str, evidence: Any
    ) -> dict[str, Any]:
        """Add a row to promotions/ and return it."""
        record = {
            "action": action,
            "who": who(),
            "model": self.cfg.mlflow.model,
            "from_version": before[0],
            "from_drafter": before[1],
            "to_version": after[0],
            "to_drafter": after[1],
            "reason": reason,
            "evidence": evidence,
        }
        return self.decisions.append(record)
