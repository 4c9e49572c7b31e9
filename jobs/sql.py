"""flywheel sql tau_by_domain_and_version     (or a path to your own file; no name: list them)

One question over the work folder, answered by DuckDB. Views `acceptance`, `traffic`, `rejects`,
`set_aside`, `promotions`, `champion` and the macros of sql/00_sources.sql are there already. Reads
what manifests publish, writes nothing. Times and days are UTC.
"""

import glob
from datetime import date, datetime
from decimal import Decimal
from itertools import takewhile
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

import sql
from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table, visible
from store import promotions
from store.schemas import ACCEPTANCE, REJECTS, SET_ASIDE, TRAFFIC
from store.shards import shard_paths
from store.traffic_table import read_traffic

FOLDER = Path(next(iter(sql.__path__)))
SOURCES = "00_sources.sql"
DATASETS = {
    "acceptance_rows": ("acceptance", ACCEPTANCE),
    "reject_rows": ("rejects", REJECTS),
    "set_aside_rows": ("set_aside", SET_ASIDE),
}
MAX_SUMMARY_ROWS = 200
LONGEST = 120
"""Characters of a text that a table of many columns shows."""


def run(cfg: Config) -> dict[str, Any]:
    """Answer `sql.question` and print the table; returns it, cut to MAX_SUMMARY_ROWS rows.

    Raises ValueError for a question that does not exist and for SQL that DuckDB refuses.
    """
    if not cfg.sql.question:
        names = questions()
        print_table("Questions", ["name", "what it answers"], [(n, _title(n)) for n in names])
        return {"stage": "sql", "questions": names}
    path = find_question(cfg.sql.question)
    if not shard_paths(cfg.path("acceptance")):
        console.print(f"note: {cfg.path('acceptance')} is empty; `flywheel evaluate` fills it")
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


def ask(cfg: Config, query: str, name: str = "query") -> pa.Table:
    """The result of `query` over the work folder. Raises ValueError starting with `name`."""
    with connect(cfg, with_traffic="traffic" in query.lower()) as connection:
        try:
            found = connection.sql(query)
            if found is None:
                raise ValueError(f"{name}: no statement in it returns rows; end with a SELECT")
            return found.to_arrow_table()
        except duckdb.Error as error:
            raise ValueError(f"{name}: {error}") from error


def connect(cfg: Config, with_traffic: bool) -> duckdb.DuckDBPyConnection:
    """An in-memory DuckDB with the views and macros over the published files of the work folder.

    Traffic is read and merged by store.traffic_table, which takes time: only where a query names
    it.
    """
    connection = duckdb.connect()
    for view, (folder, schema) in DATASETS.items():
        paths = [glob.escape(str(path)) for path in shard_paths(cfg.path(folder))]
        if paths:
            connection.read_parquet(paths, hive_partitioning=False, union_by_name=True).create_view(
                view
            )
        else:
            connection.register(view, schema.empty_table())  # a glob over nothing is an error
    traffic = read_traffic(cfg.path("traffic")) if with_traffic else TRAFFIC.empty_table()
    connection.register("traffic_rows", traffic)
    connection.register("promotion_rows", promotions.read_table(cfg.path("promotions")))
    connection.execute((FOLDER / SOURCES).read_text())
    return connection


def questions() -> list[str]:
    """Names of the questions in sql/."""
    return sorted(path.stem for path in FOLDER.glob("*.sql") if path.name != SOURCES)


def find_question(name: str) -> Path:
    """The file of a question: a name from sql/ or a path."""
    own = FOLDER / f"{name.removesuffix('.sql')}.sql"
    for path in (Path(name), own):
        if path.is_file():
            return path
    raise ValueError(f"no question {name!r}: give a path or one of {', '.join(questions())}")


def _title(name: str) -> str:
    """The question that a file opens with: its first comment, up to the question mark."""
    lines = (FOLDER / f"{name}.sql").read_text().splitlines()
    comment = " ".join(line[3:] for line in takewhile(lambda line: line.startswith("-- "), lines))
    return comment.partition("?")[0] + "?"


def _plain(value: Any) -> Any:
    """A value that JSON can hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Decimal):  # DuckDB's sum of integers, for one
        return int(value) if value == value.to_integral_value() else float(value)
    return value.isoformat() if isinstance(value, date | datetime) else str(value)


if __name__ == "__main__":
    run_as_module("sql")
