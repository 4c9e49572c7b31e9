"""Questions over the work folder, answered by DuckDB: views of the published files, and macros."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path

import duckdb
import pyarrow as pa

import sql
from jobs.base.config import Config
from jobs.dataset.database import open_database
from jobs.dataset.shard_sums import SCHEMAS, summaries
from store.schemas import TABLES

FOLDER = Path(next(iter(sql.__path__)))
CHECKS = FOLDER / "checks"
SOURCES = "00_sources.sql"
PARAMETER = re.compile(r"(\w+)=(\S*): (.+)")
"""A line of a question's first comment: name=default: meaning. Without a default it is required."""
FILLED_BY = {
    "acceptance": "flywheel evaluate",
    "production": "flywheel ingest",
    "traffic": "flywheel ingest",
    "texts": "flywheel ingest",
    "rejects": "flywheel ingest",
    "logs": "flywheel ingest",
    "selection": "flywheel select",
    "features": "flywheel harvest",
    "set_aside": "flywheel harvest",
    "promotions": "flywheel promote",
    "stages": "flywheel evaluate",
    "windows": "flywheel retrain",
}
"""View -> a command that fills it."""


@dataclass(frozen=True)
class Question:
    """A file of SQL. `comment`: its first one. `defaults`: by parameter; None: it must be given."""

    name: str
    file: str
    query: str
    comment: str
    defaults: dict[str, str | None]

    @property
    def title(self) -> str:
        """What it asks: the comment up to the question mark or the first full stop."""
        return re.split(r"(?<=[?.])\s", self.comment, maxsplit=1)[0]

    @classmethod
    def read(cls, path: Path) -> "Question":
        """The question in a file."""
        query = path.read_text()
        lines = takewhile(lambda line: line.startswith("--"), query.splitlines())
        text, defaults = [], {}
        for line in (line[2:].strip() for line in lines):
            found = PARAMETER.fullmatch(line)
            if found:
                defaults[found[1]] = found[2] or None
            else:
                text.append(line)
        return cls(path.stem, str(path), query, " ".join(text), defaults)

    def values(self, given: Mapping[str, str]) -> dict[str, str]:
        """As `bound`, for the parameters of its last statement. Raises ValueError for SQL that
        DuckDB cannot parse, too.
        """
        try:
            statements = duckdb.extract_statements(self.query)
        except duckdb.Error as error:
            raise ValueError(f"{self.file}: {error}") from error
        return self.bound(given, sorted(statements[-1].named_parameters) if statements else [])

    def bound(self, given: Mapping[str, str], used: Collection[str]) -> dict[str, str]:
        """The value of each parameter that the SQL uses: given, else its default. Raises ValueError
        for one that it does not have, and for one without a value.
        """
        known = [*self.defaults, *(name for name in used if name not in self.defaults)]
        shown = " ".join(f"{n}={self.defaults.get(n) or 'VALUE'}" for n in known)
        have = f"it has {shown}" if known else "it has none"
        for name in given:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else have
                raise ValueError(f"{self.name} has no parameter {name!r}: {hint}")
        values = {name: given.get(name, self.defaults.get(name)) for name in used}
        lacking = [name for name, value in values.items() if value is None]
        if lacking:
            raise ValueError(
                f"{self.name} needs {', '.join(lacking)}: `flywheel sql {self.name} {shown}`"
            )
        return values  # pyright: ignore[reportReturnType]


@contextmanager
def opened(
    cfg: Config, query: str | None = None, without: Collection[str] = ()
) -> Iterator[duckdb.DuckDBPyConnection]:
    """A database with the views and macros of sql/ over the latest versions, for the block. Only
    those summaries and sizes are there that `query` needs (None: all). Tables in `without` are not
    read and have no rows: for damaged ones.
    """
    acceptance, read = cfg.table("acceptance"), [name for name in TABLES if name not in without]
    versions: dict[str, int | None] = dict.fromkeys(read)
    if "acceptance" in read:
        versions["acceptance"] = acceptance.version()
    with open_database(cfg, versions) as connection:
        for name in without:
            connection.register(f"{name}_rows", TABLES[name].empty_table())
        asked = query is None or re.search(r"(acceptance|production)_(requests|rounds)", query)
        asked = asked and "acceptance" in read
        files = summaries(cfg, acceptance, versions["acceptance"]) if asked else {}
        for kind, schema in SCHEMAS.items():
            if files.get(kind):
                connection.read_parquet(files[kind]).create_view(f"{kind}_summary")
            else:
                connection.register(f"{kind}_summary", schema.empty_table())
        counted = read if query is None or "shards" in query else ()
        connection.register("shards_rows", _shards(cfg, counted))
        connection.execute((FOLDER / SOURCES).read_text())
        yield connection


def _shards(cfg: Config, tables: Collection[str]) -> pa.Table:
    rows = [
        {"table": name, "shard": shard.name, "bytes": shard.bytes, "rows": shard.rows}
        for name in tables
        for shard in cfg.table(name).shards().values()
    ]
    kinds = [("table", pa.string()), ("shard", pa.string())]
    return pa.Table.from_pylist(
        rows, pa.schema([*kinds, ("bytes", pa.int64()), ("rows", pa.int64())])
    )


def ask(
    cfg: Config, query: str, name: str = "query", parameters: Mapping[str, str] | None = None
) -> pa.Table:
    """The result of `query` over the work folder, with the views and macros of sql/. `parameters`
    are bound, never pasted; the SQL says what type they have ($hours::double).

    Raises ValueError, beginning with `name`, for SQL that DuckDB refuses or that returns no table,
    and for a parameter that it cannot read.
    """
    with opened(cfg, query) as connection:
        return answer(connection, query, name, parameters)


def answer(
    connection: duckdb.DuckDBPyConnection,
    query: str,
    name: str,
    parameters: Mapping[str, str] | None = None,
) -> pa.Table:
    """As `ask`, over a database that is open."""
    try:
        found = connection.sql(query, params=dict(parameters) if parameters else None)
        if found is None:
            raise ValueError(f"{name}: no statement in it returns rows; end with a SELECT")
        return found.to_arrow_table()
    except duckdb.Error as error:
        given = ""
        if parameters and isinstance(error, duckdb.ConversionException):
            given = f"\nthe parameters are {' '.join(f'{n}={v}' for n, v in parameters.items())}"
        raise ValueError(f"{name}: {error}{given}") from error


def ask_question(cfg: Config, question: Question, given: Mapping[str, str]) -> pa.Table:
    """The answer to a question with parameters. Raises as `ask` and Question.values."""
    return ask(cfg, question.query, question.file, question.values(given))


def empty_sources(cfg: Config, query: str) -> list[str]:
    """Views of `query` that have no row, each with the command that fills it."""
    words = set(re.findall(r"\w+", re.sub(r"_(requests|rounds)\b", "", query)))
    with opened(cfg, "") as connection:
        return [
            f"{view} is empty; `{command}` fills it"
            for view, command in FILLED_BY.items()
            if view in words and not connection.execute(f"select 1 from {view} limit 1").fetchone()
        ]


def questions() -> list[Question]:
    """The questions in sql/."""
    paths = sorted(path for path in FOLDER.glob("*.sql") if path.name != SOURCES)
    return [Question.read(path) for path in paths]


def checks() -> list[Question]:
    """The health checks in sql/checks/: each returns the rows that are wrong."""
    return [Question.read(path) for path in sorted(CHECKS.glob("*.sql"))]


def find_question(name: str) -> Path:
    """The file of a question: a name from sql/ or a path. Raises ValueError if there is none."""
    own = FOLDER / f"{name.removesuffix('.sql')}.sql"
    for path in (Path(name), own):
        if path.is_file():
            return path
    known = [question.name for question in questions()]
    close = get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"one of {', '.join(known)}"
    raise ValueError(f"no question {name!r}: give a path, or {hint}")
