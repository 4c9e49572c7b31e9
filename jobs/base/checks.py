"""One finding about a machine, a folder or a server, and how findings are shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jobs.base.console import print_finding, print_table


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `fix` says what to do and is empty when all is well."""

    name: str
    found: str
    status: Literal["ok", "warn", "fail", "skip"] = "ok"
    fix: str = ""


def print_checks(title: str, checks: Sequence[Check]) -> None:
    """The table, and what to do about each row that is not fine."""
    print_table(title, ["", "check", "found"], [[c.status, c.name, c.found] for c in checks])
    for check in checks:
        if check.fix:
            print_finding(check.status, check.name, check.fix)


def none_fails(checks: Sequence[Check]) -> bool:
    """The verdict: what is skipped or only warned of fails nothing."""
    return all(check.status != "fail" for check in checks)
