"""Rows of the narrow tables, written without a stage."""

from typing import Any

import pyarrow as pa

from jobs.base.config import Config
from store.leakage import token_bytes
from store.schemas import TABLES
from store.traffic_table import regroup


def add_rows(cfg: Config, name: str, rows: list[dict[str, Any]]) -> None:
    """Add rows to a table of the run; columns that a row lacks are null."""
    cfg.table(name).append(pa.Table.from_pylist(rows, schema=TABLES[name]))


def put_rows(cfg: Config, name: str, rows: list[dict[str, Any]]) -> None:
    """The same in place of all rows."""
    table = cfg.table(name)
    shard = table.write(pa.Table.from_pylist(rows, schema=TABLES[name]))
    table.change(lambda live: ([shard], list(live)))


def regrouped(table: pa.Table, earlier: dict[str, str] | None = None) -> pa.Table:
    """`regroup` of TRAFFIC rows with their prompts."""
    texts = token_bytes(table["prompt_ids"])
    prompts = dict(zip(table["sample_id"].to_pylist(), texts, strict=True))
    return regroup(table, prompts, {"default"}, earlier)
