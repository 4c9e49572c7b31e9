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
    """A console that prints a str as it is, except for characters that act on the terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's `print`, but a str goes through `visible`; line ends and `style=` are kept."""
        plain = [Text(visible(o, lines=True)) if isinstance(o, str) else o for o in objects]
        super().print(*plain, **options)


def _width() -> int | None:
    """None (the terminal's own), or for a log file a width at which table cells do not wrap."""
    return None if sys.stderr is not None and sys.stderr.isatty() else 140


console = PlainConsole(stderr=True, highlight=False, markup=False, emoji=False, width=_width())


def visible(text: str, longest: int | None = None, lines: bool = False) -> str:
    """`text` with escapes for characters that do not print, such as control characters and those
    that change the text direction. A text of blanks alone gets quotes.

    `lines` keeps line ends. A text longer than `longest` is cut and ends in dots and a hash of the
    whole, so that two long texts stay different.
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
    """The first ten names in order, separated by commas, and how many more there are."""
    ordered = sorted(set(names))
    text = ", ".join(map(short_name, ordered[:10]))
    return f"{text} and {len(ordered) - 10} more" if len(ordered) > 10 else text


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    most: int | None = MOST_ROWS,
) -> None:
    """A table on stderr; floats get four digits or all before the point, None a dash, numbers
    align right.

    After `most` rows a line says how many more there are.
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
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 9999.5 <= abs(value) < 1e12 else f"{value:.4g}"
