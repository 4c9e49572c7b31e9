"""DuckDB over the narrow tables of a work folder, within a limit of memory."""

from collections.abc import Mapping

import duckdb

from jobs.base.config import Config

MEMORY = "512MB"
"""What sorts and joins may use before they spill to the scratch folder."""


def open_database(cfg: Config, versions: Mapping[str, int | None]) -> duckdb.DuckDBPyConnection:
    """An in-memory database with these versions of tables (None: the latest) as NAME_rows. They are
    read when a query needs them. Days are in UTC. Close it: an open connection can abort the
    interpreter at its end.
    """
    folder = str(cfg.path("duckdb"))
    connection = duckdb.connect(config={"memory_limit": MEMORY, "temp_directory": folder})
    connection.execute("set timezone = 'UTC'; set preserve_insertion_order = false")
    for name, version in versions.items():
        connection.register(f"{name}_rows", cfg.table(name).dataset(version))
    return connection
