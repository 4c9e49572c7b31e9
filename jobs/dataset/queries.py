"""Questions over the work folder, answered by DuckDB: views of the published files, and macros."""

import glob
from itertools import takewhile
from pathlib import Path

import duckdb
import pyarrow as pa

import sql
from jobs.base.config import Config
from store import promotions
from store.schemas import ACCEPTANCE, REJECTS, SET_ASIDE, TRAFFIC
from store.shards import read_dataset, shard_paths
from store.traffic_table import read_traffic

FOLDER = Path(next(iter(sql.__path__)))


SOURCES = "00_sources.sql"


DATASETS = {
    "acceptance_rows": ("acceptance", ACCEPTANCE),
    "reject_rows": ("rejects", REJECTS),
}


def ask(cfg: Config, query: str, name: str = "query") -> pa.Table:
    """The result of `query` over the work folder.

    Raises ValueError, beginning with `name`, for SQL that DuckDB refuses or that returns no table.
    """
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

    Traffic is read and merged by store.traffic_table. That takes time, so without `with_traffic`
    its view is empty.
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
    aside = read_dataset(cfg.path("set_aside"), SET_ASIDE)  # adds columns that older files lack
    connection.register("set_aside_rows", aside)
    connection.register("promotion_rows", promotions.read_table(cfg.path("promotions")))
    connection.execute((FOLDER / SOURCES).read_text())
    return connection


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
