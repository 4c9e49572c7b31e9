"""flywheel sql tau_by_domain_and_version     (or a path to your own file; no name: list them)

One question over the work folder, answered by DuckDB. Queries can use the views `acceptance`,
`traffic`, `selection`, `rejects`, `set_aside`, `promotions`, `champion`, `logs` and `stages`, and
the macros of sql/00_sources.sql. Only published data is read; nothing is written. Times and days
are UTC.
"""

from datetime import date, datetime
from decimal import Decimal
from typing import Any

from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table, visible
from jobs.dataset.queries import ask, find_question, questions, title

MAX_SUMMARY_ROWS = 200
LONGEST = 120
"""Most characters of a text cell in the table."""


def run(cfg: Config) -> dict[str, Any]:
    """Answer `sql.question` and print the table; returns it, cut to MAX_SUMMARY_ROWS rows.

    Raises ValueError for a question that does not exist and for SQL that DuckDB refuses.
    """
    if not cfg.sql.question:
        names = questions()
        print_table("Questions", ["name", "what it answers"], [(n, title(n)) for n in names])
        return {"stage": "sql", "questions": names}
    path = find_question(cfg.sql.question)
    if not cfg.table("acceptance").shards():
        console.print(f"note: {cfg.place('acceptance')} is empty; `flywheel evaluate` fills it")
    table = ask(cfg, path.read_text(), str(path))
    rows = [[_plain(row[name]) for name in table.column_names] for row in table.to_pylist()]
    shown = [[visible(v, LONGEST) if isinstance(v, str) else v for v in row] for row in rows]
    print_table(path.stem, table.column_names, shown, most=None)
    return {
        "stage": "sql",
        "question": path.stem,
        "columns": table.column_names,
        "num_rows": table.num_rows,
        "rows": rows[:MAX_SUMMARY_ROWS],
    }


def _plain(value: Any) -> Any:
    """A value that JSON can hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Decimal):  # DuckDB's sum of integers, for one
        return int(value) if value == value.to_integral_value() else float(value)
    return value.isoformat() if isinstance(value, date | datetime) else str(value)


if __name__ == "__main__":
    run_as_module("sql")
