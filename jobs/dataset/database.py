"""DuckDB over the narrow tables of a work folder, within a limit of memory."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import duckdb

from jobs.base.config import Config
from store.place import first_line, plain_fault

MEMORY = "512MB"
"""What sorts and joins may use before they spill to the scratch folder."""


@contextmanager
def open_database(
    cfg: Config, versions: Mapping[str, int | None]
) -> Iterator[duckdb.DuckDBPyConnection]:
    """An in-memory database with these versions of tables (None: the latest) as NAME_rows, for the
    block. They are read when a query needs them. Days are in UTC.

    Raises OSError for what DuckDB could not do in the block, such as read a shard.
    """
    config: dict[str, Any] = {"memory_limit": MEMORY, "temp_directory": str(cfg.path("duckdb"))}
    try:
        # It must be closed: an open connection can abort the interpreter at its end.
        with duckdb.connect(config=config) as connection:
            connection.execute("set timezone = 'UTC'; set preserve_insertion_order = false")
            for name, version in versions.items():
                connection.register(f"{name}_rows", cfg.table(name).dataset(version))
            yield connection
    except duckdb.Error as error:
        where = str(cfg.place())
        text = f"a query over the tables failed ({first_line(error)})"
        raise plain_fault(error, where) or OSError(errno.EIO, text, where) from error
