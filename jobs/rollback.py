"""flywheel rollback [rollback.reason="..."]

Make an earlier champion the champion again: the latest one that still loads, is for the same target
and was not itself rolled back. The present champion is marked bad, so that no gate accepts it
again. Then the replicas follow at once, if any are known (`flywheel rollout` brings later what does
not answer now).
"""

from typing import Any

from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console
from jobs.promotion.champion_moves import promoting
from jobs.promotion.going_back import go_back
from jobs.reconciling.observed import has_fleet
from jobs.reconciling.reconciler import reconciling
from jobs.registry.versions import CHAMPION


def run(cfg: Config) -> dict[str, Any]:
    """Roll back; returns the old and the new champion's version.

    Raises ValueError when there is no champion, or no earlier one that can be used; the message has
    the reason for each.
    """
    with promoting(cfg) as moves:
        champion = moves.registry.current(CHAMPION)
        if champion is None:
            raise ValueError(
                "the registry has no champion, so there is nothing to roll back: "
                "`flywheel promote` makes one"
            )
        target, skipped = go_back(cfg, moves, champion, cfg.rollback.reason)
    console.print(f"rolled back: champion {champion.number} -> {target.number}")
    fleet = _fleet(cfg) if has_fleet(cfg) else None
    return {
        "stage": "rollback",
        "decision": "rolled back",
        "version": target.number,
        "previous": champion.number,
        "reason": cfg.rollback.reason,
        "skipped": skipped,
        "fleet": fleet,
    }


def _fleet(cfg: Config) -> dict[str, Any]:
    """Bring the replicas to the new champion, without a canary: it served before."""
    try:
        with reconciling(cfg) as one:
            end, why, now = one.run(with_canary=False)
    except (ValueError, OSError) as error:  # the registry has moved, and that stands
        end, why, now = "hold", str(error), None
    console.print(f"fleet: {why}")
    if end != "done":
        console.print("note: `flywheel rollout` goes on when that is mended")
    replicas = {one.url: one.label for one in now.seen} if now else {}
    return {"ok": end == "done", "why": why, "replicas": replicas}


if __name__ == "__main__":
    run_as_module("rollback")
