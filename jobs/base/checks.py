"""One finding about a machine, a folder or a server, and how findings are shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jobs.base.console import print_finding, print_table


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `fix` says what to do; it is empty if there is nothing to do."""

    name: str
    found: str
    status: Literal["ok", "warn", "fail", "skip"] = "ok"
    fix: str = ""


def print_checks(title: str, checks: Sequence[Check]) -> None:
    """Print the table, and after it what to do about each row that has a fix."""
    print_table(title, ["", "check", "found"], [[c.status, c.name, c.found] for c in checks])
    for check in checks:
        if check.fix:
            print_finding(check.status, check.name, check.fix)


def none_fails(checks: Sequence[Check]) -> bool:
    """Whether no check failed. Skipped checks and warnings are no failures."""
    return all(check.status != "fail" for check in checks)
