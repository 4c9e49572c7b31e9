"""What people see: messages, tables and progress on stderr. Stdout belongs to the JSON summary."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

# A log file has no width: wide enough that tables do not fold.
console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 140)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table on stderr; floats get four significant digits, None a dash, numbers align right."""
    rows = [list(row) for row in rows]
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float | None) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
