"""Windows of retraining: rows of the table windows, one per window and step.

Row 0 of a window, step `window`, is about the whole of it. A window is the samples that one version
of traffic/ has and an earlier one lacks. No clock decides what belongs to it
(docs/decisions/047-windows-of-traffic.md).
"""

import json
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from store.fences import TRIES, Fence
from store.lease import Lease
from store.schemas import WINDOWS
from store.tables import Conflict, Table

Row = dict[str, Any]

WHOLE = "window"
"""The step of the row about a whole window."""
OPEN = ("running", "failed", "waiting")
"""States of a window that the next command goes on with. waiting: for the roll-out to decide."""
TAKEN = ("promoted", "unchanged", "held", "refused", "rolled back")
"""States in which a window has ended, and its samples count as used."""
LEFT = ("skipped", "abandoned")
"""States in which it has ended, and its samples belong to the next window too."""
STEP_STATES = ("running", "done", "skipped", "failed", "waiting")
"""States of the other rows."""


@dataclass
class Window:
    """One window: its rows by step, in order. Numbers are what JSON can hold."""

    number: int
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def whole(self) -> Row:
        """The row about all of it."""
        return self.rows[WHOLE]

    @property
    def state(self) -> str:
        """The state of the window, one of OPEN, TAKEN and LEFT."""
        return self.whole["state"]

    def numbers(self, step: str) -> dict[str, Any]:
        """The numbers of a step; {} if it has not begun."""
        return self.rows[step]["numbers"] if step in self.rows else {}

    def is_done(self, step: str) -> bool:
        """Whether a step need not run again."""
        return step in self.rows and self.rows[step]["state"] in ("done", "skipped")

    def put(self, step: str, **values: Any) -> None:
        """Set values of the row of a step, which is made if there is none."""
        known = self.rows.get(step, {"place": len(self.rows), "reason": "", "numbers": {}})
        self.rows[step] = {"seconds": 0.0} | known | {"step": step} | values


def read(table: Table) -> list[Window]:
    """All windows, the oldest first."""
    found: dict[int, Window] = {}
    for row in table.read().sort_by([("window", "ascending"), ("place", "ascending")]).to_pylist():
        window = found.setdefault(row["window"], Window(row["window"]))
        window.rows[row["step"]] = row | {"numbers": json.loads(row["numbers"] or "{}")}
    return list(found.values())


def of_target(windows: list[Window], target_id: str) -> list[Window]:
    """Those about traffic of one target."""
    return [one for one in windows if one.whole["target_id"] == target_id]


def unfinished(windows: list[Window]) -> Window | None:
    """The window that a command has to go on with; None if there is none."""
    return next((one for one in reversed(windows) if one.state in OPEN), None)


def watermark(windows: list[Window]) -> int | None:
    """The version of traffic/ whose samples are used; None before the first window. Windows are of
    one target (`of_target`).
    """
    taken = [one.whole["to_version"] for one in windows if one.state in TAKEN]
    return taken[-1] if taken else None


def needed_versions(windows: list[Window]) -> dict[str, set[int]]:
    """The versions of tables that windows to come are measured from, and those that an unfinished
    one learns from; gc keeps their files.
    """
    targets = {one.whole["target_id"] for one in windows}
    marks = {watermark(of_target(windows, target)) for target in targets}
    traffic = {version for version in marks if version is not None}
    found = {"traffic": traffic} if traffic else {}
    one = unfinished(windows)
    if one is not None and "version" in (numbers := one.numbers("select")):
        found["selection"] = {numbers["version"]}
    return found


class Writer:
    """Writes windows under a lease. It raises Lost if the lease has ended."""

    def __init__(self, table: Table, held: Lease):
        self.table, self.held = table.under(held.check), held
        self.fence: Fence | None = None

    def write(self, window: Window) -> None:
        """Put the rows of a window in place of those that the table has."""
        if self.fence is None:  # not before: a command that has nothing to do writes nothing
            self.fence = Fence(self.table, self.held)
        shared = ("target_id", "from_version", "to_version", "captured_from", "captured_to")
        rest: Row = {name: window.whole[name] for name in shared}
        rest |= {"window": window.number, "lease": self.held.number}
        rows = [
            row | rest | {"numbers": json.dumps(row["numbers"])} for row in window.rows.values()
        ]
        shard = self.table.write(pa.Table.from_pylist(rows, schema=WINDOWS))
        for _ in range(TRIES):
            version = self.table.version() or 0
            self.fence.check(version)
            try:
                self.table.replace("window", [window.number], [shard], expect=version)
                return
            except Conflict:
                continue  # gc has put its shards together, or another lease was noted
        raise OSError(f"{self.table.place}: {TRIES} commits were lost to other writers; run again")
