"""Drafter versions in MLflow: registered once per weights, named by aliases, checked when opened.

MLflow's aliases have no compare-and-set and no history, so whoever moves one holds `lease` and
writes a record (store/promotions.py). Readers get an explicit version and its folder from
`resolve`, with the weights compared to what was registered.
"""

import contextlib
import fcntl
import getpass
import json
import logging
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import mlflow.artifacts
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from dflash.checkpoint import drafter_sha256
from jobs.config import Config
from jobs.tracking import open_client

CHAMPION, PREVIOUS, CHALLENGER = "champion", "previous", "challenger"
BAD = "flywheel.bad"
SHA256, COMPAT, FIELDS = "weights.sha256", "vllm.compat", "vllm.compat.fields"
LEASE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Version:
    """One registered drafter. `compat` are the fields behind its compat key; `bad` says why it
    must not be champion again, or is empty.
    """

    number: str
    source: str
    sha256: str
    compat: dict[str, Any]
    bad: str

    @classmethod
    def of(cls, found: ModelVersion) -> "Version":
        """From MLflow's entity. Raises ValueError for a version that was not registered here."""
        tags = found.tags
        if SHA256 not in tags or FIELDS not in tags:
            raise ValueError(
                f"version {found.version} of {found.name} lacks the tags {SHA256} and {FIELDS}: "
                "it was not registered by `flywheel promote`; delete it or move its alias"
            )
        return cls(
            number=str(found.version),
            source=str(found.source),
            sha256=tags[SHA256],
            compat=json.loads(tags[FIELDS]),
            bad=tags.get(BAD, ""),
        )


class Registry:
    """The registered model `mlflow.model`."""

    def __init__(self, cfg: Config):
        self.cfg, self.model = cfg, cfg.mlflow.model
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        cfg.path().mkdir(parents=True, exist_ok=True)
        self.client = open_client(cfg)

    def current(self, alias: str) -> Version | None:
        """The version an alias names; None if there is no such alias (or no model yet)."""
        try:
            return Version.of(self.client.get_model_version_by_alias(self.model, alias))
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise

    def get(self, number: str) -> Version | None:
        """A version by its number; None if it was deleted or never was."""
        try:
            return Version.of(self.client.get_model_version(self.model, number))
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise

    def register(self, folder: Path, tags: dict[str, str]) -> Version:
        """The version of these weights: the one that has them already, or a new one. Needs the
        lease. `tags` (with SHA256 and FIELDS) are set anew on a known version: the latest
        evaluation counts.
        """
        self._create_model()
        query = f"name = '{self.model}' and tags.`{SHA256}` = '{tags[SHA256]}'"
        known = self.client.search_model_versions(query)
        if known:
            number = str(min(int(version.version) for version in known))
            for name, value in tags.items():
                self.client.set_model_version_tag(self.model, number, name, value)
        else:
            source = str(folder.resolve())
            run = self._training_run(folder.name)
            made = self.client.create_model_version(self.model, source, run_id=run, tags=tags)
            number = str(made.version)
        found = self.get(number)
        assert found is not None
        return found

    def set_alias(self, alias: str, version: Version) -> None:
        """Point an alias at a version. Needs the lease."""
        self.client.set_registered_model_alias(self.model, alias, version.number)

    def drop_alias(self, alias: str, version: Version) -> None:
        """Remove an alias if it names this version. Needs the lease."""
        found = self.current(alias)
        if found is not None and found.number == version.number:
            self.client.delete_registered_model_alias(self.model, alias)

    def mark_bad(self, version: Version, reason: str) -> None:
        """Tag a version so that no gate accepts it again."""
        self.client.set_model_version_tag(self.model, version.number, BAD, reason)

    def open(self, version: Version) -> Path:
        """The local folder of a version, downloaded if it is remote. Raises ValueError naming the
        path when it is gone or holds other weights than were registered.
        """
        folder = self._local(version)
        hint = (
            f"version {version.number} of {self.model} cannot be used: restore the folder, "
            "or `flywheel rollback`"
        )
        if not folder.is_dir():
            raise ValueError(f"{folder} is gone; {hint}")
        found = drafter_sha256(folder)
        if found != version.sha256:
            raise ValueError(
                f"{folder} holds other weights ({found[:12]}) than were registered "
                f"({version.sha256[:12]}); {hint}"
            )
        return folder

    def _local(self, version: Version) -> Path:
        parts = urlparse(version.source)
        if parts.scheme in ("", "file"):
            return Path(unquote(parts.path) if parts.scheme else version.source)
        cache = self.cfg.path("downloads", version.sha256[:12])
        if not cache.is_dir():
            partial = cache.with_name(f".{cache.name}.partial")  # a killed download leaves it
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            mlflow.artifacts.download_artifacts(
                version.source, dst_path=str(partial), tracking_uri=self.cfg.mlflow_uri
            )
            partial.rename(cache)
        inner = [p.parent for p in cache.rglob("config.json")]
        return inner[0] if inner else cache

    def _create_model(self) -> None:
        try:
            self.client.create_registered_model(self.model)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _training_run(self, name: str) -> str | None:
        """The MLflow run that made a drafter, if this registry's server tracked it."""
        experiment = self.client.get_experiment_by_name(self.cfg.mlflow.experiment)
        if experiment is None:
            return None
        runs = self.client.search_runs(
            [experiment.experiment_id], f"tags.`flywheel.run` = '{name}'"
        )
        return runs[0].info.run_id if runs else None


def resolve(cfg: Config, name: str) -> tuple[str, Path] | None:
    """(version number, local folder) of an alias or a version number, weights verified.

    None when the alias names nothing ("no champion yet"): a server then keeps what it runs. Raises
    ValueError for a number that does not exist and for a folder that is gone or was changed.
    """
    sqlite = cfg.mlflow_uri.removeprefix("sqlite:///")
    if sqlite != cfg.mlflow_uri and not Path(sqlite).exists():
        return None  # a registry that was never written; asking would create it
    registry = Registry(cfg)
    version = registry.get(name) if name.isdigit() else registry.current(name)
    if version is None:
        if name.isdigit():
            raise ValueError(f"{cfg.mlflow.model} has no version {name}")
        return None
    return version.number, registry.open(version)


def who() -> str:
    """user@host, as it stands in leases and promotion records."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


@contextlib.contextmanager
def lease(cfg: Config, seconds: float = LEASE_SECONDS) -> Iterator[None]:
    """Be the only one who moves aliases of this work folder; waits up to `seconds`.

    A kernel lock on a file, so it ends with its process, however that ends. Raises ValueError
    naming the holder when the time is up.
    """
    path = cfg.path("promotions", ".lease")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as stream:
        deadline = time.monotonic() + seconds
        while not _try_lock(stream):
            if time.monotonic() > deadline:
                stream.seek(0)
                raise ValueError(
                    f"another promotion is running ({stream.read().strip()}, lock {path}): "
                    "wait for it to end, then try again"
                )
            time.sleep(0.2)
        stream.truncate(0)
        stream.write(who())
        stream.flush()
        yield


def _try_lock(stream: Any) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
