"""MLflow's client: its failures become one message, and any text can be a name or a value."""

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any, cast

import requests
from alembic.util.exc import CommandError
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from sqlalchemy import create_engine, text
from sqlalchemy.exc import SQLAlchemyError

from jobs.base.config import Config
from store.ids import short_hash

HINTS = {
    "readonly database": "allow writing to it, or name another in mlflow.uri",
    "unable to open database": "create its folder and allow writing there, or correct mlflow.uri",
    "malformed": "restore it from a backup, or move it away to begin a new one",
    "not a database": "restore it from a backup, or move it away to begin a new one",
    "disk is full": "free some space, then run the same command again",
    "disk I/O error": "free some space or mend the disk, then run the same command again",
    "database is locked": "another process writes to it: run the same command again",
    "out-of-date database schema": "stop what uses it, copy it, run `mlflow db upgrade` on it",
    "Can't locate revision": "a newer MLflow wrote it: use that, or name another in mlflow.uri",
    "Max retries exceeded": "start the server, then run the same command again",
    "Connection": "start the server, then run the same command again",
    "401": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
    "PERMISSION_DENIED": "ask for the right to write there, or name another in mlflow.uri",
}
"""Part of a message of MLflow or its database -> what to do about it."""


DRIVERS = {"psycopg2": "psycopg2-binary"}
"""Module -> package, where they differ."""
OPENING = 0x666C7977
"""Key of the lock under which a PostgreSQL database is opened."""


class MlflowFault(ValueError):
    """A call of MLflow failed; `code` is MLflow's own, such as RESOURCE_DOES_NOT_EXIST."""

    def __init__(self, message: str, code: str = ""):
        super().__init__(message)
        self.code = code


class _Told:
    """A client whose methods raise MlflowFault."""

    def __init__(self, client: MlflowClient, uri: str):
        self._client, self._uri = client, uri

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if not callable(found):
            return found

        @wraps(found)
        def call(*args: Any, **kwargs: Any) -> Any:
            with told(self._uri):
                return found(*args, **kwargs)

        return call


@contextlib.contextmanager
def told(uri: str) -> Iterator[None]:
    """Turn errors of MLflow, its database or its server into an MlflowFault about `uri`."""
    try:
        yield
    except ModuleNotFoundError as error:  # of SQLAlchemy: the driver of a database
        raise MlflowFault(
            f"mlflow.uri {shown(uri)} needs {error.name}, which is not installed: pip install "
            f"{DRIVERS.get(str(error.name), error.name)}"
        ) from error
    except (MlflowException, SQLAlchemyError, CommandError, requests.RequestException) as error:
        text = str(getattr(error, "orig", None) or error)
        hint = next((hint for part, hint in HINTS.items() if part in text), "")
        first = cut(text.strip().splitlines()[0] if text.strip() else type(error).__name__, 400)
        message = f"MLflow at {shown(uri)}: {first}" + (f". What to do: {hint}" if hint else "")
        raise MlflowFault(message, getattr(error, "error_code", "")) from error


def shown(uri: str) -> str:
    """The URI without user name and password."""
    return re.sub(r"//[^/@]*@", "//", uri)


def open_client(cfg: Config) -> MlflowClient:
    """A client of mlflow.uri for runs and registry; creates the database if there is none.

    Raises MlflowFault if no server answers or the file is not a database. MLflow alone would retry
    for minutes.
    """
    uri = cfg.mlflow_uri
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout is for JSON
    for chatty in ("mlflow.store.db.utils", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if uri.startswith(("http://", "https://")):
        _check_server(uri)
    file = sqlite_file(cfg)
    if file is not None and file.is_file():
        _check_sqlite(file)
    with told(uri), _alone(file), _alone_in_postgres(uri):
        if file is not None and not file.exists():
            _create_sqlite(file)
        client = MlflowClient(uri, uri)
        client.search_registered_models(max_results=1)  # makes MLflow create the registry's tables
    return cast(MlflowClient, _Told(client, uri))


def sqlite_file(cfg: Config) -> Path | None:
    """The file of an SQLite mlflow.uri; None for any other URI."""
    path = cfg.mlflow_uri.partition("?")[0].removeprefix("sqlite:///")
    return None if path == cfg.mlflow_uri or path == ":memory:" else Path(path)


def equals(column: str, value: str) -> str:
    """A filter clause that finds rows with this text, whatever characters it has. MLflow's filters
    have no escapes, so each character other than a letter, digit, space, dot or dash becomes a
    wildcard. The caller must compare what it finds with the text.
    """
    pattern = re.sub(r"[^\w. -]", "_", value)
    return f"{column} LIKE '{pattern}'"


def plain(text: str) -> str:
    """Any text as part of a metric name or artifact path. Characters that MLflow refuses are
    replaced and long texts are cut; a hash then keeps the names distinct.
    """
    name = re.sub(r"[^\w\-. :]", "_", text)[:100]
    changed = name != text or not name.strip(".")
    return f"{name}-{short_hash(text)[:6]}" if changed else name


def cut(value: Any, limit: int) -> str:
    """Any value as text that a database accepts, of at most `limit` characters. A hash keeps cut
    texts distinct.
    """
    text = str(value).replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    return text if len(text) <= limit else f"{text[: limit - 20]}... {short_hash(text)}"


def _check_server(uri: str) -> None:
    try:
        with contextlib.suppress(requests.exceptions.SSLError):  # even then a server answers
            requests.get(f"{uri.rstrip('/')}/health", timeout=10)
    except requests.exceptions.RequestException as error:
        raise MlflowFault(
            f"mlflow.uri {shown(uri)} does not answer ({type(error).__name__}): start the MLflow "
            "server there, or correct mlflow.uri"
        ) from error


def _check_sqlite(file: Path) -> None:
    with file.open("rb") as stream:
        start = stream.read(16)
    if start and start != b"SQLite format 3\0":
        raise MlflowFault(
            f"{file} is not an SQLite database: restore it, or move it away to begin a new one"
        )


def _create_sqlite(file: Path) -> None:
    """Make a database with MLflow's tables in one step. One that a kill or a full disk had left
    with some of them would fail for ever: `table ... already exists`.
    """
    new = file.with_name(f".{file.name}.new")
    for left in (new, new.with_name(f"{new.name}-journal")):
        left.unlink(missing_ok=True)
    MlflowClient(f"sqlite:///{new}", f"sqlite:///{new}").search_registered_models(max_results=1)
    os.replace(new, file)


@contextlib.contextmanager
def _alone(file: Path | None) -> Iterator[None]:
    """Be the only process that opens an SQLite file: two at once would both create its tables."""
    if file is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            stream = stack.enter_context(file.with_name(f".{file.name}.lock").open("a"))
        except OSError:
            if not file.is_file():
                raise
            stream = None  # a read-only folder: no process can create tables there
        if stream is not None:
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _alone_in_postgres(uri: str) -> Iterator[None]:
    """Be the only process of any host that opens a PostgreSQL database: see `_alone`."""
    if not uri.startswith("postgresql"):
        yield
        return
    engine = create_engine(uri)
    try:
        with engine.connect() as connection:
            connection.execute(text(f"select pg_advisory_lock({OPENING})"))
            try:
                yield
            finally:
                connection.execute(text(f"select pg_advisory_unlock({OPENING})"))
    finally:
        engine.dispose()
