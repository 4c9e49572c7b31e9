"""What the sections of the page read, each thing once for a look at the work folder."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from threading import Timer
from typing import Any

import duckdb

from jobs.base.config import Config
from jobs.dataset.queries import Question, answer, find_question, opened
from jobs.looking.aside import borrow_summaries, copy_registry
from jobs.registry import versions
from jobs.registry.versions import CHAMPION, Version
from store import promotions
from store.place import first_line
from store.schemas import TABLES

Row = dict[str, Any]
SECONDS = 30.0
"""What one question may take."""


@dataclass
class Sources:
    """One look at a work folder. `aside`: the settings to read with (jobs/looking/aside.py), `cfg`:
    the user's; `now`: when it began. `damaged`: {table: what is wrong} of tables that cannot be
    read, once the database is open.
    """

    cfg: Config
    aside: Config
    now: datetime
    damaged: dict[str, str] = field(default_factory=dict)
    database: duckdb.DuckDBPyConnection | None = None
    _answers: dict[str, list[Row]] = field(default_factory=dict)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Open the database for the block. Damaged tables have no rows in it."""
        for name in TABLES:
            with self._noting(name):
                self.aside.table(name).dataset()
        self.aside.path("summaries").mkdir(parents=True, exist_ok=True)
        borrow_summaries(self.cfg, self.aside)
        with ExitStack() as stack:
            if "acceptance" not in self.damaged:
                with self._noting("acceptance"):  # a shard that cannot be summed up
                    self.database = stack.enter_context(opened(self.aside, None, self.damaged))
            if self.database is None:
                self.database = stack.enter_context(opened(self.aside, None, self.damaged))
            yield
        self.database = None

    @contextmanager
    def _noting(self, table: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self.damaged[table] = first_line(error)

    def interrupt(self) -> None:
        """Stop the question that is being answered, if any; for another thread."""
        if self.database is not None:
            with suppress(duckdb.Error):  # it was closed meanwhile
                self.database.interrupt()

    def check(self, *tables: str) -> None:
        """Raise ValueError if one of these tables cannot be read."""
        for name in tables:
            if name in self.damaged:
                raise ValueError(
                    f"the table {name} cannot be read: {self.damaged[name]}. If that stays so, "
                    f"restore {self.cfg.place(name)} from a backup"
                )

    def ask(self, name: str, *tables: str) -> list[Row]:
        """The answer to a question of sql/, which reads `tables`. Raises ValueError if one of them
        is damaged, and if there is no answer within SECONDS.
        """
        self.check(*tables)
        if name not in self._answers:
            question = Question.read(find_question(name))
            self._answers[name] = self.query(question.query, name, question.values({}))
        return self._answers[name]

    def query(self, query: str, name: str, values: dict[str, str] | None = None) -> list[Row]:
        """The answer to SQL of our own, within the same time."""
        assert self.database is not None
        alarm = Timer(SECONDS, self.interrupt)
        alarm.start()
        try:
            return answer(self.database, query, name, values).to_pylist()
        except ValueError as error:
            if isinstance(error.__cause__, duckdb.InterruptException):
                raise ValueError(
                    f"{name} took longer than {SECONDS:g} s here: ask `flywheel sql {name}`"
                ) from error
            raise
        finally:
            alarm.cancel()

    @cached_property
    def decisions(self) -> list[Row]:
        """The question promotions: every decision, the oldest first."""
        return self.ask("promotions", "promotions")

    @cached_property
    def champion(self) -> Row | None:
        """The decision that made the present champion; None before the first."""
        moves = [row for row in self.decisions if row["action"] in promotions.MOVES]
        return moves[-1] if moves else None

    @cached_property
    def registered(self) -> Version | None:
        """The champion of the registry. Raises ValueError if it cannot be asked."""
        copy_registry(self.cfg, self.aside)
        registry = versions.opened(self.aside)
        return registry.current(CHAMPION) if registry else None
