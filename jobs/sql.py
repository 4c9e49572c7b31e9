"""flywheel sql tau_by_day [days=7]     (a path to your own file; no name: list the questions)
flywheel sql savings price_per_hour=98 --format csv > savings.csv
flywheel sql shell

One question over the work folder, answered by DuckDB. docs/how-to/read-the-tables.md lists the
views and macros. Parameters are name=value; they are bound, so they are data. Only published data
is read, and nothing is written but summaries in the scratch folder. Times and days are UTC.
"""

from typing import Any

from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.dataset.answers import show, write
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
            Shell(connection).cmdloop()
        return {}
    question = Question.read(find_question(cfg.sql.question))
    table = ask_question(cfg, question, _parameters(cfg.sql.parameters))
    if not table.num_rows:
        notes = empty_sources(cfg, question.query) or ["no row of the tables fits the question"]
        for note in notes:
            console.print(f"note: {note}")
    if cfg.sql.format != "table":
        write(table, cfg.sql.format)
        return {}
    console.print(question.comment)
    rows = show(question.name, table)
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


if __name__ == "__main__":
    run_as_module("sql")
