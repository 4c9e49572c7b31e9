"""Settings with which readers of a work folder write nothing into it.

Questions write summaries into the scratch folder, and opening the registry takes a lock and may
create it. Here both happen in a folder of the reader's own, which ends with it.
"""

import sqlite3
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from jobs.base.config import Config
from jobs.tracking.mlflow_client import shown, sqlite_file

SECONDS = 5.0
"""What a replica may take to say how it is."""


def set_aside(cfg: Config, folder: Path) -> Config:
    """`cfg` with `folder` in place of its scratch folder. The target and a registry on a server
    stay where they are; a registry in an SQLite file is read from a copy, see `copy_registry`.
    """
    uri = cfg.mlflow_uri
    if not uri.startswith(("http://", "https://")):
        uri = f"sqlite:///{folder / 'mlflow.db'}"
    aside = cfg.override("rollout", timeout=min(SECONDS, cfg.rollout.timeout))
    return replace(
        aside.override("mlflow", uri=uri).override("target", path=str(cfg.target_path)),
        scratch=str(folder),
    )


def borrow_summaries(cfg: Config, aside: Config) -> None:
    """Link the summaries that other commands have made, so that none is made again."""
    made = cfg.path("summaries")
    for file in made.glob("*/*.parquet"):
        mine = aside.path("summaries") / file.relative_to(made)
        mine.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            mine.symlink_to(file)


def copy_registry(cfg: Config, aside: Config) -> None:
    """Copy a registry in an SQLite file as it is now; nothing if there is none, or it is a server.

    Raises ValueError for a file that cannot be copied, and for another database: opening one takes
    a lock and may create tables.
    """
    if cfg.mlflow_uri.startswith(("http://", "https://")):
        return
    file = sqlite_file(cfg)
    if file is None:
        raise ValueError(
            f"the registry in {shown(cfg.mlflow_uri)} is not read here, since a database is opened "
            "under a lock: name an MLflow server in mlflow.uri to see it"
        )
    if not file.exists():
        return
    copy = aside.path("mlflow.db")
    try:
        with (
            closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
    except sqlite3.Error as error:
        copy.unlink(missing_ok=True)
        raise ValueError(
            f"the registry {file} cannot be read ({error}): restore it from a backup, or move it "
            "away to begin a new one"
        ) from error
