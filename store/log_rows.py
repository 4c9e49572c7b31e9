"""The rows of table files, Parquet and CSV."""

import csv
import io
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 64
"""Rows of Parquet that are Python objects at a time: conversations can be long."""
FIELD = 64 << 20  # characters of one field of a CSV file
Row = dict[str, Any]


class Stream(Protocol):
    """What is needed of a file: a line of at most so many bytes, none at its end."""

    def readline(self, most: int, /) -> bytes: ...  # noqa: D102


def parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """(number, row) of each row; cells without a value are left out. Raises ArrowInvalid or OSError
    where the file is damaged.
    """
    number = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS):
            for row in batch.to_pylist():
                yield number, {name: value for name, value in row.items() if value is not None}
                number += 1


def csv_rows(stream: Stream) -> Iterator[tuple[int, Row | None]]:
    """(byte offset, row) of each row below the header; empty cells are left out. None is a row that
    has more cells than the header, or is not UTF-8.
    """
    csv.field_size_limit(FIELD)
    lines = _Lines(stream)
    rows = csv.reader(lines, strict=True)
    header = next(rows, [])
    while True:
        begin = lines.offset
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error:
            yield begin, None
            continue
        if cells:
            bad = len(cells) > len(header) or any("\ufffd" in cell for cell in cells)
            named = zip(header, cells, strict=False)
            yield begin, None if bad else {name: cell for name, cell in named if cell}


class _Lines:
    """Lines of a stream as text; `offset` is where the next one begins."""

    def __init__(self, stream: Stream):
        self.stream, self.offset = stream, 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self.stream.readline(FIELD)
        if not line:
            raise StopIteration
        self.offset += len(line)
        return line.decode("utf-8-sig" if self.offset == len(line) else "utf-8", "replace")


def as_bytes(row: Row) -> bytes:
    """A row as JSON: what is kept of one that is rejected."""
    return msgspec.json.encode(row, enc_hook=_plain)


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, date) else repr(value)


def table_kind(path: Path, head: bytes) -> str | None:
    """What a table with columns of a known format is, parquet or csv; None for any other file."""
    if head.startswith(b"PAR1"):
        try:
            with pq.ParquetFile(path) as file:
                return "parquet" if _is_known(file.schema_arrow.names) else None
        except (pa.ArrowInvalid, OSError):
            return None
    first = head.removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0].decode("utf-8", "replace")
    if first.lstrip()[:1] in ("{", "["):
        return None
    try:
        names = next(csv.reader(io.StringIO(first)), [])
    except csv.Error:  # a field of more than 128 KiB: no header
        return None
    return "csv" if _is_known(names) else None


def _is_known(names: list[str]) -> bool:
    known = {"messages", "conversation", "conversations"}, {"input", "output"}
    pairs = {"prompt", "completion"}, {"prompt", "response"}, {"request", "response"}
    return bool(known[0] & {*names}) or any(pair <= {*names} for pair in (known[1], *pairs))
