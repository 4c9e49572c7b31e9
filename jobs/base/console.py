"""What people see: messages, tables and progress on stderr. Stdout belongs to the JSON summary.

Text from outside (labels of clients, model names, paths, log lines) is data: nothing here reads
markup, emoji codes or control characters in it. Styles are arguments.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from store.ids import short_hash

NAME, CELL = 60, 400
"""Characters shown of a name (a domain, say) and of any cell of a table."""
MOST_ROWS = 200


class PlainConsole(Console):
    """A console that prints every str as it is, but for what would act on the terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's; a str is shown by `visible`, its lines and `style=` are kept."""
        plain = [Text(visible(o, lines=True)) if isinstance(o, str) else o for o in objects]
        super().print(*plain, **options)


def _width() -> int | None:
    """A log file has no width: wide enough that tables do not fold."""
    return None if sys.stderr is not None and sys.stderr.isatty() else 140


console = PlainConsole(stderr=True, highlight=False, markup=False, emoji=False, width=_width())


def visible(text: str, longest: int | None = None, lines: bool = False) -> str:
    """`text` with control, direction and other characters that do not print as escapes; blanks
    alone get quotes.

    `lines` keeps line ends. What is longer than `longest` ends in dots and a hash of the whole, so
    that two such texts differ.
    """
    shown = "".join(
        c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode()
        for c in text
    )
    if shown and not shown.strip(" \n"):
        return repr(text)
    if longest is None or len(shown) <= longest:
        return shown
    return f"{shown[: longest - 8]}..{short_hash(text)[:6]}"


def short_name(text: str) -> str:
    """A name from outside, such as a domain's, for a message, a table or a progress bar."""
    return visible(text, NAME)


def some_names(names: Iterable[str]) -> str:
    """The first ten in order, by commas, and how many more there are."""
    ordered = sorted(set(names))
    text = ", ".join(map(short_name, ordered[:10]))
    return f"{text} and {len(ordered) - 10} more" if len(ordered) > 10 else text


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    most: int | None = MOST_ROWS,
) -> None:
    """A table on stderr; floats get four significant digits, None a dash, numbers align right.

    Behind `most` rows a line says how many more there are.
    """
    rows = [list(row) for row in rows]
    table = Table(title=_text(title), title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float | None) for row in rows)
        table.add_column(_text(column), justify="right" if numeric else "left", overflow="fold")
    for row in rows[:most]:
        table.add_row(*(_text(_cell(value)) for value in row))
    console.print(table)
    if most is not None and len(rows) > most:
        console.print(f"and {len(rows) - most} more rows; the JSON line and the files have all")


def print_finding(status: str, about: str, text: str) -> None:
    """One thing to do: "fail: port 8000: stop what listens there", its beginning in bold."""
    head = (visible(f"{status}: {about}"), "bold")
    console.print(Text.assemble(head, f": {visible(text, lines=True)}"))


def _text(value: str) -> Text:
    return Text(visible(value, CELL))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
