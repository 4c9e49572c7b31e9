"""Questions over the work folder, answered by DuckDB: views of the published files, and macros."""

from itertools import takewhile
from pathlib import Path

import duckdb
import pyarrow as pa

import sql
from jobs.base.config import Config
from jobs.dataset.database import open_database

FOLDER = Path(next(iter(sql.__path__)))
SOURCES = "00_sources.sql"
TABLES = (
    "acceptance",
    "logs",
    "promotions",
    "rejects",
    "selection",
    "set_aside",
    "stages",
    "traffic",
    "windows",
)
"""What a question can ask about; sql/00_sources.sql makes views of them."""


def ask(cfg: Config, query: str, name: str = "query") -> pa.Table:
    """The result of `query` over the work folder, with the views and macros of sql/.

    Raises ValueError, beginning with `name`, for SQL that DuckDB refuses or that returns no table.
    """
    with open_database(cfg, dict.fromkeys(TABLES)) as connection:
        connection.execute((FOLDER / SOURCES).read_text())
        try:
            found = connection.sql(query)
            if found is None:
                raise ValueError(f"{name}: no statement in it returns rows; end with a SELECT")
            return found.to_arrow_table()
        except duckdb.Error as error:
            raise ValueError(f"{name}: {error}") from error


def questions() -> list[str]:
    """Names of the questions in sql/."""
    return sorted(path.stem for path in FOLDER.glob("*.sql") if path.name != SOURCES)


def find_question(name: str) -> Path:
    """The file of a question: a name from sql/ or a path. Raises ValueError if there is none."""
    own = FOLDER / f"{name.removesuffix('.sql')}.sql"
    for path in (Path(name), own):
        if path.is_file():
            return path
    raise ValueError(f"no question {name!r}: give a path or one of {', '.join(questions())}")


def title(name: str) -> str:
    """The question that a file opens with: its first comment, up to the question mark."""
    lines = (FOLDER / f"{name}.sql").read_text().splitlines()
    comment = " ".join(line[3:] for line in takewhile(lambda line: line.startswith("-- "), lines))
    return comment.partition("?")[0] + "?"
