"""flywheel sql tau_by_day [days=7]     (a path to your own file; no name: list the questions)
flywheel sql savings price_per_hour=98 --format csv > savings.csv
flywheel sql shell

One question over the work folder, answered by DuckDB. docs/how-to/read-the-tables.md lists the
views and macros. Parameters are name=value; they are bound, so they are data. Only published data
is read, and nothing is written but summaries in the scratch folder. Times and days are UTC.
"""

import csv
import io
import json
import sys
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table, visible
from jobs.dataset.queries import (
    Question,
    ask_question,
    empty_sources,
    find_question,
    opened,
    questions,
)
from jobs.dataset.sql_shell import Shell

MAX_SUMMARY_ROWS = 200
MOST_ROWS = 1000
"""Most rows of the table."""
LONGEST = 120
"""Most characters of a text cell in the table."""
DIGITS = 6
"""Digits after the point in CSV and JSON."""
SHELL = "shell"


def run(cfg: Config) -> dict[str, Any]:
    """Answer `sql.question` and print the table; returns it, cut to MAX_SUMMARY_ROWS rows. In any
    other format the answer alone goes to stdout, and nothing is returned.

    Raises ValueError for a question that does not exist, for parameters that it does not have or
    lacks, and for SQL that DuckDB refuses.
    """
    if not cfg.sql.question:
        return _list()
    if cfg.sql.question == SHELL:
        with opened(cfg) as connection:
            console.print("End a statement with ; and the shell with .quit. `show tables;` lists.")
            Shell(connection, lambda table: _show("", table)).cmdloop()
        return {}
    question = Question.read(find_question(cfg.sql.question))
    table = ask_question(cfg, question, _parameters(cfg.sql.parameters))
    if not table.num_rows:
        for note in empty_sources(cfg, question.query):
            console.print(f"note: {note}")
    if cfg.sql.format != "table":
        _write(table, cfg.sql.format)
        return {}
    console.print(question.comment)
    rows = _show(question.name, table)
    return {
        "stage": "sql",
        "question": question.name,
        "columns": table.column_names,
        "num_rows": table.num_rows,
        "rows": rows[:MAX_SUMMARY_ROWS],
    }


def _list() -> dict[str, Any]:
    found = questions()
    lines = [
        [q.name, q.title, " ".join(f"{n}={d or '...'}" for n, d in q.defaults.items())]
        for q in found
    ]
    print_table("Questions", ["name", "what it answers", "parameters"], lines)
    return {"stage": "sql", "questions": [question.name for question in found]}


def _parameters(words: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _show(title: str, table: pa.Table) -> list[list[Any]]:
    """Print an answer; returns its rows. Text that is the same in every row is said once."""
    columns = [column.to_pylist() for column in table.columns]
    rows = [list(row) for row in zip(*columns, strict=True)]
    same = [
        len(rows) > 1 and isinstance(values[0], str | datetime) and set(values) == {values[0]}
        for values in columns
    ]
    shown = [[_shown(v) for v, s in zip(row, same, strict=True) if not s] for row in rows]
    names = [n.replace("_", " ") for n, s in zip(table.column_names, same, strict=True) if not s]
    print_table(title, names, shown, most=MOST_ROWS)
    once = [
        f"{name.replace('_', ' ')} {_shown(values[0])}"
        for name, values, s in zip(table.column_names, columns, same, strict=True)
        if s
    ]
    if once:
        console.print(f"in every row: {', '.join(once)}")
    if len(rows) > MOST_ROWS:
        console.print("--format csv, json or parquet gives all rows")
    return [[_plain(v) for v in row] for row in rows]


def _shown(value: Any) -> Any:
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M}"
    value = _plain(value)
    return visible(value, LONGEST) if isinstance(value, str) else value


def _write(table: pa.Table, kind: str) -> None:
    """The answer alone on stdout."""
    if kind == "parquet":
        if sys.stdout.isatty():
            raise ValueError(
                "Parquet is binary: send it to a file, --format parquet > answer.parquet"
            )
        sink = io.BytesIO()
        pq.write_table(table, sink)
        sys.stdout.buffer.write(sink.getvalue())
        sys.stdout.buffer.flush()
        return
    columns = [[_plain(v) for v in column.to_pylist()] for column in table.columns]
    rows = [
        [round(v, DIGITS) if isinstance(v, float) else v for v in row]
        for row in zip(*columns, strict=True)
    ]
    if kind == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([table.column_names, *rows])
    else:
        print(json.dumps([dict(zip(table.column_names, row, strict=True)) for row in rows]))


def _plain(value: Any) -> Any:
    """A value that JSON can hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Decimal):  # DuckDB's sum of integers, for one
        return int(value) if value == value.to_integral_value() else float(value)
    return value.isoformat() if isinstance(value, date | datetime) else str(value)


if __name__ == "__main__":
    run_as_module("sql")
