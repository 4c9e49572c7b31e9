"""A prompt for SQL over an open database, as `flywheel sql shell` shows it."""

import sys
from cmd import Cmd

import duckdb

from jobs.base.console import console
from jobs.dataset.answers import show
from jobs.dataset.queries import answer

ENDS = (".quit", ".exit", "quit", "exit")


class Shell(Cmd):
    """Reads statements that end in a semicolon, over as many lines as they need. It ends at `.quit`
    or the end of the input (Ctrl-D). Tab completes names.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection):
        super().__init__()
        self.connection, self.pending = connection, ""
        self.prompts = ("flywheel> ", "     ...> ")
        if not sys.stdin.isatty():  # a script needs no prompts among its answers
            self.use_rawinput, self.prompts = False, ("", "")
        self.prompt = self.prompts[0]
        found = connection.execute(NAMES).fetchall()
        self.names = sorted({name for row in found for name in row})

    def onecmd(self, line: str) -> bool:
        """Take a line; returns whether the shell ends."""
        if line == "EOF" or (not self.pending and line.strip() in ENDS):
            return True
        self.pending += f"{line}\n"
        if is_complete(self.pending):
            query, self.pending = self.pending, ""
            try:
                show("", answer(self.connection, query, "error"))
            except ValueError as error:
                console.print(str(error))
        self.prompt = self.prompts[bool(self.pending.strip())]
        return False

    def completedefault(self, text: str, *ignored: object) -> list[str]:
        """Views and columns that begin with `text`."""
        return [name for name in self.names if name.startswith(text)]

    completenames = completedefault


NAMES = "select table_name, column_name from duckdb_columns() where not internal"


def is_complete(text: str) -> bool:
    """Whether a semicolon ends the statement: none in a string or a comment."""
    tokens = [at for at, kind in duckdb.tokenize(text) if kind != duckdb.token_type.comment]
    return bool(tokens) and text.encode()[tokens[-1] :].startswith(b";")
