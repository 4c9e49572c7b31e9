"""Log files: which files of a folder are logs, what each one is, and its decompressed bytes.

A log is named by its absolute path, or by its URL if it is in a bucket.
"""

import glob
import io
import json
import re
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import pyarrow as pa

from store.log_rows import table_kind
from store.place import Found, place_of
from store.record_readers import recognised

Stamp = list[Any]
"""All that changes when a log does. A file: size, mtime and ctime in ns, inode. An object in a
bucket: size, time, e_tag."""
Entries = dict[str, tuple[str, Stamp | None]]
"""Name in its folder -> (log's name, its stamp; None: no file). Names of folders end in "/"."""
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
OTHERS = {
    b"ARROW1": "an Arrow file",
    b"PK\x03\x04": "a ZIP archive",
    b"SQLite format 3": "an SQLite database",
    b"BZh": "compressed with bzip2 (gzip and zstd are read)",
    b"\xfd7zXZ\x00": "compressed with xz (gzip and zstd are read)",
    b"\xff\xfe": "text in UTF-16 (UTF-8 is read)",
    b"\xfe\xff": "text in UTF-16 (UTF-8 is read)",
}
"""First bytes of files that are not logs, and what such a file is."""
NAME = re.compile(r"\.(jsonl|ndjson|json|csv|parquet)([.-][^/]*)?$")
"""Names of logs: capture.jsonl, or rotated: capture.jsonl.1, capture.jsonl-20261129.gz."""
UNFINISHED = (".tmp", ".part", ".swp")
COPY = "flywheel-"
"""How the folders of copies begin."""
LEFT = 86_400
"""Seconds after which a copy is a leftover."""
HEAD = 1 << 20
PIECE = 64 << 10
"""Bytes that are decompressed at once. So many may be lost before a damaged place of a log."""
_SERVERS = re.compile(rb"\b(INFO|DEBUG)\b")


def find_logs(patterns: list[str]) -> tuple[dict[str, Stamp], dict[str, list[str]]]:
    """({log: stamp}, each log once and sorted; {folder: names in it that are not logs}).

    A pattern is a file, a folder (its *.jsonl, *.json, *.csv and *.parquet
    files, also rotated and compressed ones) or a glob,
    on a local disk or in a bucket (s3://bucket/folder/). A glob stands for the files that match or,
    if none does, for the folders that match. Raises ValueError for a pattern that gives no file.
    """
    found: dict[str, Stamp] = {}
    aside: dict[str, list[str]] = {}
    for pattern in patterns:
        logs, folders = _in_bucket(pattern) if "://" in pattern else _on_disk(pattern)
        for folder, entries in {} if logs else folders.items():
            inside = {name: entry for name, entry in entries.items() if not name.startswith(".")}
            mine = {name: log for name, log in inside.items() if log[1] and _is_log(name)}
            aside[folder] = sorted(inside.keys() - mine.keys())
            logs |= dict(mine.values())
        if not logs:
            kinds = "*.jsonl, *.json, *.csv or *.parquet"
            what = f"no {kinds} file in" if folders else "no such file, folder or glob:"
            raise ValueError(
                f"ingest.logs: {what} {pattern}; name your logs with ingest.logs=PATH, or capture "
                "traffic with flywheel serve serve.capture=FOLDER"
            )
        found |= logs
    return dict(sorted(found.items())), {folder: names for folder, names in aside.items() if names}


def _on_disk(pattern: str) -> tuple[dict[str, Any], dict[str, Entries]]:
    """({log: stamp} of the files, the folders) that a path or glob stands for."""
    path = Path(pattern)
    named = [path] if path.exists() else [*map(Path, glob.glob(pattern, recursive=True))]
    folders = {
        str(folder): {
            path.name + "/" * path.is_dir(): (
                str(path.resolve()),
                stamp(path) if path.is_file() else None,
            )
            for path in folder.iterdir()
        }
        for folder in named
        if folder.is_dir()
    }
    return {str(path.resolve()): stamp(path) for path in named if path.is_file()}, folders


def _in_bucket(pattern: str) -> tuple[dict[str, Any], dict[str, Entries]]:
    """As `_on_disk`, for the URL of an object or of a prefix, or a glob (** is not one)."""
    scheme, _, path = pattern.rstrip("/").partition("://")
    bucket, *parts = path.split("/")
    if parts and (
        found := place_of("/".join([f"{scheme}://{bucket}", *parts[:-1]])).head(parts[-1])
    ):
        return {f"{scheme}://{path}": _stamp(found)}, {}
    fixed = [*takewhile(lambda part: not set(part) & set("*?["), parts)]
    wanted, base = parts[len(fixed) :], place_of("/".join([f"{scheme}://{bucket}", *fixed]))
    logs: dict[str, Stamp] = {}
    folders: dict[str, Entries] = {}
    for found in base.objects():
        names = found.name.split("/")
        above, below = names[: len(wanted)], names[len(wanted) :]
        if len(above) < len(wanted) or not all(map(fnmatchcase, above, wanted)):
            continue
        log = f"{base}/{found.name}", _stamp(found)
        if not below:
            logs |= [log]
            continue
        inside = folders.setdefault("/".join([str(base), *above]), {})
        inside |= {below[0]: log} if len(below) == 1 else {f"{below[0]}/": (log[0], None)}
    return logs, folders


def stamp(path: Path) -> Stamp:
    """The stamp of a local file."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _stamp(found: Found) -> Stamp:
    return [found.size, found.modified.isoformat(), found.e_tag]


@contextmanager
def on_disk(log: str, copies: Path | None = None) -> Iterator[Path]:
    """The path of a log for the block: itself, or a temporary copy of an object in a bucket.

    The copy is below the local folder `copies` (None: the system's). Old ones there are removed.
    """
    if "://" not in log:
        yield Path(log)
        return
    folder, _, name = log.rpartition("/")
    if copies:
        copies.mkdir(parents=True, exist_ok=True)
        _remove_left(copies)
    with TemporaryDirectory(prefix=COPY, dir=copies) as scratch:
        place_of(folder).save(name, Path(scratch, name))
        yield Path(scratch, name)


def _remove_left(copies: Path) -> None:
    """Remove copies that processes left which were killed: nobody reads one log for so long."""
    for copy in copies.glob(f"{COPY}*"):
        with suppress(FileNotFoundError):  # another reader was first
            if time.time() - copy.stat().st_mtime > LEFT:
                shutil.rmtree(copy, ignore_errors=True)


def _is_log(name: str) -> bool:
    return bool(NAME.search(name)) and not name.endswith(UNFINISHED)


def open_log(path: Path) -> BinaryIO:
    """The bytes of a log, decompressed if its first bytes say gzip or zstd, whatever its name.

    A compressed log that is cut or damaged ends at that place without an error; `damage` says why.
    """
    file = open(path, "rb")  # noqa: SIM115 (handed to the caller)
    head = file.read(4)
    file.seek(0)
    if head.startswith(GZIP):
        return io.BufferedReader(_Unpacked(file, _gunzip(file)), 1 << 20)
    if head.startswith(ZSTD):
        stream = pa.CompressedInputStream(pa.PythonFile(file), "zstd")
        return io.BufferedReader(_Unpacked(file, iter(lambda: stream.read(PIECE), b"")), 1 << 20)
    return file


def is_packed(stream: BinaryIO) -> bool:
    """Whether the stream is being decompressed, so that its length is known only at its end."""
    return isinstance(getattr(stream, "raw", None), _Unpacked)


def damage(stream: BinaryIO) -> str | None:
    """Why a stream of `open_log` ended before its file did. None if it did not, or if it is not at
    its end yet.
    """
    raw = getattr(stream, "raw", None)
    if not isinstance(raw, _Unpacked) or stream.read(1):
        return None
    return raw.damage


class _Unpacked(io.RawIOBase):
    """The blocks of a decompressor as a file that ends at the first error."""

    def __init__(self, file: BinaryIO, blocks: Iterator[bytes]):
        self.file, self.blocks = file, blocks
        self.left = b""
        self.damage: str | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.left:
            try:
                self.left = next(self.blocks)
            except StopIteration:
                return 0
            except (zlib.error, EOFError, OSError) as error:
                self.damage, self.blocks = str(error), iter(())
                return 0
        count = min(len(buffer), len(self.left))
        buffer[:count], self.left = self.left[:count], self.left[count:]
        return count

    def close(self) -> None:
        self.file.close()
        super().close()


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    """Decompressed blocks of all gzip members. Raises EOFError where a member is cut."""
    member = None
    while data := file.read(PIECE):
        while data:
            member = member or zlib.decompressobj(wbits=31)
            yield member.decompress(data)
            data, member = (member.unused_data, None) if member.eof else (b"", member)
            if member is None and not data.strip(b"\0"):  # padding between members
                data = b""
    if member is not None:
        raise EOFError("the file ends inside a gzip member")


def other_kind(path: Path) -> str | None:
    """What a file is that holds no JSON lines, in a few words; None if it may be a log."""
    with open_log(path) as stream:
        head = stream.read(HEAD)
    for start, kind in OTHERS.items():
        if head.startswith(start):
            return kind
    if head.startswith(b"PAR1") and table_kind(path, head) is None:
        return "a Parquet file, damaged or without a column that is known"
    body = head.removeprefix(b"\xef\xbb\xbf")
    # Standard output may hold the server's lines and records: then the records count.
    if any(map(_is_servers, body.split(b"\n"))):
        with open_log(path) as stream:
            return None if any(map(_is_ours, stream)) else "the server's own text log"
    return None


def container(path: Path) -> str:
    """How the records of a log follow one another: "lines" of JSON, "elements" of a JSON array (or
    objects over several lines), or rows of "csv" or "parquet".
    """
    with open_log(path) as stream:
        head = stream.read(HEAD)
    body = head.removeprefix(b"\xef\xbb\xbf")
    if kind := table_kind(path, head):
        return kind
    is_array = re.match(rb"\s*\[\s*\{", body) and (_is_array(body) or not _has_record(body))
    over_lines = re.match(rb"\s*\{\s*\n", body) and not _has_record(body)
    return "elements" if is_array or over_lines else "lines"


def _is_servers(line: bytes) -> bool:
    """Whether a line is a message of vLLM's own log about a request."""
    said = b"Received request" in line or b"Generated response" in line
    return said and _SERVERS.search(line.partition(b"{")[0]) is not None


def _is_array(body: bytes) -> bool:
    """Whether the file is one JSON array: its first element is followed by another or by the end.

    False if the first of several lines is a whole JSON value: then each line is read by itself.
    """
    first, _, rest = body.strip().partition(b"\n")
    if rest and _value(first) is not None:
        return False
    text = body.decode("utf-8", "replace").lstrip()[1:].lstrip()
    try:
        end = json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError):
        return False
    behind = text[end:].strip()
    return behind.startswith(",") or behind == "]"


def _has_record(body: bytes) -> bool:
    """Whether some line is a JSON object by itself."""
    return any(map(_is_record, body.split(b"\n")))


def _is_ours(line: bytes) -> bool:
    """Whether a line has the keys of a format that is read (store/record_readers.py)."""
    return recognised(_value(line) if line.startswith(b"{") else None) is not None


def _is_record(line: bytes) -> bool:
    return line.startswith(b"{") and isinstance(_value(line), dict)


def _value(line: bytes) -> Any:
    """A line's JSON value; None if the line is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
