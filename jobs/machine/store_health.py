"""What is wrong with the tables of the work folder: the checks of sql/checks."""

from collections.abc import Iterator

from jobs.base.checks import Check
from jobs.base.config import Config
from jobs.base.packages import installed
from store.schemas import TABLES

SHOWN = 3
"""Most rows of a check that are told."""


def tables(cfg: Config) -> Iterator[Check]:
    """One finding for each check that returns rows, or one that all is well. Nothing where there is
    no table yet.
    """
    if not installed("duckdb"):
        return
    if not any(cfg.table(name).shards() for name in TABLES):
        yield Check("tables", f"none in {cfg.place()} yet", "skip")
        return
    from jobs.dataset.queries import answer, checks, opened

    every, wrong = checks(), []
    with opened(cfg) as connection:
        for check in every:
            rows = answer(connection, check.query, check.file).to_pylist()
            if rows:
                wrong.append(check.name)
                shown = "; ".join(
                    ", ".join(f"{name} {value}" for name, value in row.items())
                    for row in rows[:SHOWN]
                )
                more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
                yield Check(check.name, shown + more, "fail", check.comment)
    if not wrong:
        yield Check("tables", f"{len(every)} checks of sql/checks find nothing wrong")
