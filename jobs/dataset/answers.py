"""Answers of questions: as a table for people, or alone on stdout for programs."""

import csv
import io
import json
import sys
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.base.cli import to_stdout
from jobs.base.console import console, print_table, visible

LABELS = ("k", "temperature")
"""Columns of numbers that are labels, as text is."""
MOST_ROWS = 1000
"""Most rows of the table."""
LONGEST = 120
"""Most characters of a text cell in the table."""
DIGITS = 6
"""Digits after the point in CSV and JSON."""


def show(title: str, table: pa.Table) -> list[list[Any]]:
    """Print an answer; returns its rows. A label that is the same in every row is said once."""
    columns = [column.to_pylist() for column in table.columns]
    rows = [list(row) for row in zip(*columns, strict=True)]
    same = [
        len(rows) > 1
        and (name in LABELS or isinstance(values[0], str | datetime))
        and set(values) == {values[0]}
        for name, values in zip(table.column_names, columns, strict=True)
    ]
    if all(same):  # a table needs a column
        same = [False] * len(same)
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


def write(table: pa.Table, kind: str) -> None:
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
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([table.column_names, *rows])
        to_stdout(text.getvalue(), end="")
    else:
        to_stdout(json.dumps([dict(zip(table.column_names, row, strict=True)) for row in rows]))


def _plain(value: Any) -> Any:
    """A value that JSON can hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Decimal):  # DuckDB's sum of integers, for one
        return int(value) if value == value.to_integral_value() else float(value)
    return value.isoformat() if isinstance(value, date | datetime) else str(value)
