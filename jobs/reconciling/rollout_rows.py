"""The roll-out in promotions/: every decision and measurement is a row, and the rows are its state.

A row's `from` is the drafter that the canary is compared with, its `to` the champion that is rolled
out. Its action begins with `rollout-`, and no reader takes such a row for a move of the champion.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jobs.base.config import Config
from jobs.promotion.champion_moves import Moves, promoting
from jobs.registry.versions import CHAMPION, Version
from store import promotions
from store.ids import drafter_version
from store.lease import Lease

CANARY, MEASURE, ADVANCE, HOLD = "canary", "measure", "advance", "hold"
ROLLBACK, RESTART, FALLBACK = "rollback", "restart", "fallback"
PREFIX = "rollout-"

Row = dict[str, Any]


class Moved(ValueError):
    """The champion is another one by now: look again."""


@dataclass(frozen=True, slots=True)
class History:
    """What the rows say about the roll-out of one champion."""

    canary: Row | None  # the latest choice of a canary
    decision: str  # ADVANCE, ROLLBACK, FALLBACK or empty
    proven: bool  # it needs no canary: it was rolled out before, or is where one went back to
    measured: Row | None  # the latest measurement since the canary was chosen
    last: Row | None  # its latest row of any action


def history(cfg: Config, champion: Version) -> History:
    """The rows of this champion since it last became champion."""
    rows = promotions.read(cfg.table("promotions"))
    drafter = drafter_version(champion.sha256)
    moves = [r for r in rows if r["action"] in promotions.MOVES]
    mine = [r for r in moves if r["to_version"] == champion.number]
    since = mine[-1]["number"] if mine else 0
    ours = [r for r in rows if _of(r, champion.number, drafter)]
    now = [r for r in ours if r["number"] > since]
    canary = _last(now, CANARY)
    after = [r for r in now if canary is None or r["number"] > canary["number"]]
    ends = [r for r in after if _action(r) in (ADVANCE, ROLLBACK, FALLBACK)]
    # An interrupted roll-back may have moved the alias and not recorded that.
    backs = [r for r in rows if _action(r) == ROLLBACK]
    went_back = bool(backs) and backs[-1]["from_drafter"] == drafter
    returned = bool(mine) and mine[-1]["action"] == "rollback"
    proven = returned or went_back or any(_action(r) == ADVANCE for r in ours)
    return History(
        canary=canary,
        decision=_action(ends[-1]) if ends else "",
        proven=proven,
        measured=_last(after, MEASURE),
        last=now[-1] if now else None,
    )


def rows_of_rollout(cfg: Config, number: int) -> list[Row]:
    """The row of a canary with this number and all later ones of the same champion, up to its end
    or the next canary.
    """
    found: list[Row] = []
    for row in promotions.read(cfg.table("promotions")):
        if row["number"] == number:
            found = [row]
        elif found and _of(row, found[0]["to_version"], found[0]["to_drafter"]):
            if _action(row) == CANARY:
                break
            found.append(row)
    return found


@contextmanager
def recording(cfg: Config, rollout: Lease, champion: Version | None) -> Iterator["Recorder"]:
    """Hold the lease of promotions for the block. Raises Lost if the lease `rollout` has ended, and
    Moved if `champion` is not the champion any more.
    """
    with promoting(cfg) as moves:
        rollout.check()
        present = moves.registry.current(CHAMPION)
        if champion is not None and (present is None or present.number != champion.number):
            raise Moved(f"version {champion.number} is not the champion any more")
        moves.complete_history(present)
        yield Recorder(moves, rollout)


@dataclass(frozen=True, slots=True)
class Recorder:
    """Adds rows under both leases."""

    moves: Moves
    rollout: Lease

    def add(
        self, action: str, former: tuple[str, str], champion: Version, reason: str, evidence: Any
    ) -> Row:
        """Add a row. `former`: (version, sha256) that the champion is compared with."""
        self.rollout.check()
        before = (former[0] or None, drafter_version(former[1]) if former[1] else None)
        after = (champion.number, drafter_version(champion.sha256))
        return self.moves.add(PREFIX + action, before, after, reason, evidence)


def _of(row: Row, number: str, drafter: str) -> bool:
    mine = (row["to_version"], row["to_drafter"]) == (number, drafter)
    return mine and row["action"].startswith(PREFIX)


def _action(row: Row) -> str:
    return row["action"].removeprefix(PREFIX) if row["action"].startswith(PREFIX) else ""


def _last(rows: list[Row], action: str) -> Row | None:
    found = [r for r in rows if _action(r) == action]
    return found[-1] if found else None
