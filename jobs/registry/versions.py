"""Drafter versions in MLflow: registered once per identity, named by aliases, checked when opened.

The files of a version are artifacts of a run. They are uploaded, read back and compared before the
version is created, and every reader compares them again. MLflow's aliases have no compare-and-set
and no history, so whoever moves one holds a lease and writes a record (jobs/promotion). Readers get
a version number and its folder from `resolve`.
"""

import contextlib
import fcntl
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import mlflow.artifacts
from mlflow.entities.model_registry import ModelVersion

from dflash.checkpoint import (
    WEIGHTS,
    compat_fields,
    drafter_sha256,
    engine_files,
    file_sha256,
    read_config,
)
from jobs.base.config import Config
from jobs.tracking.mlflow_client import (
    MlflowFault,
    cut,
    equals,
    open_client,
    plain,
    sqlite_file,
    told,
)
from jobs.tracking.mlflow_runs import run_named
from store.lease import Lease

CHAMPION, PREVIOUS, CHALLENGER = "champion", "previous", "challenger"
BAD = "flywheel.bad"
SHA256, COMPAT, FIELDS = "drafter.sha256", "vllm.compat", "vllm.compat.fields"
K = "serve.k"
"""The tag with K by batch size, as JSON: what the promotion chose by speed."""
OLD_SHA256 = "weights.sha256"
"""The tag of versions from before the identity covered every file: the hash of model.safetensors
alone."""


MAX_TAG = 5000
"""Most characters of a tag of a version."""


@dataclass(frozen=True, slots=True)
class Version:
    """One registered drafter. `compat` has the fields that its compat key is made from. `bad` says
    why it must not become champion again, or is empty. `old`: `sha256` covers the weights file
    alone.
    """

    number: str
    source: str
    sha256: str
    compat: dict[str, Any]
    bad: str
    old: bool = False

    @classmethod
    def of(cls, found: ModelVersion) -> "Version":
        """From MLflow's entity. Raises ValueError for a version that was not registered here."""
        tags = found.tags
        try:
            compat = json.loads(tags[FIELDS])
            sha256 = tags.get(SHA256) or tags[OLD_SHA256]
            assert isinstance(compat, dict)
        except (KeyError, ValueError, AssertionError) as error:
            raise ValueError(
                f"version {found.version} of {found.name} lacks the tags {SHA256} and {FIELDS}: "
                "it was not registered by `flywheel promote`; delete it or move its alias"
            ) from error
        return cls(
            number=str(found.version),
            source=str(found.source),
            sha256=sha256,
            compat=compat,
            bad=tags.get(BAD, ""),
            old=SHA256 not in tags,
        )


class Registry:
    """The registered model `mlflow.model`. held: the lease that whatever changes it needs; each
    change checks it right before, and raises Lost if it has ended.
    """

    def __init__(self, cfg: Config, held: Lease | None = None):
        self.cfg, self.model, self.held = cfg, cfg.mlflow.model, held
        cfg.path().mkdir(parents=True, exist_ok=True)
        self.client = open_client(cfg)

    def current(self, alias: str) -> Version | None:
        """The version an alias names; None if there is no such alias (or no model yet)."""
        try:
            # Not get_model_version_by_alias: its error for an absent alias is that for a bad name.
            number = self.client.get_registered_model(self.model).aliases.get(alias)
        except MlflowFault as error:
            if error.code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return None if number is None else self.get(str(number))

    def get(self, number: str) -> Version | None:
        """A version by its number; None if it was deleted or never was."""
        try:
            found = Version.of(self.client.get_model_version(self.model, number))
        except MlflowFault as error:
            if error.code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        if found.old:  # replace its hash by today's identity, if its folder is unchanged
            with contextlib.suppress(ValueError):
                return replace(found, sha256=drafter_sha256(self.open(found)), old=False)
        return found

    def known(self, folder: Path, sha256: str) -> Version | None:
        """The version of this drafter; None if it has none."""
        number = self._known(folder, sha256)
        return None if number is None else self.get(number)

    def all_tags(self) -> list[tuple[str, dict[str, str]]]:
        """(identity, tags) of every version that was registered here, the oldest first."""
        found = self.client.search_model_versions(equals("name", self.model))
        mine = [v for v in found if v.name == self.model and SHA256 in v.tags]
        return [(v.tags[SHA256], v.tags) for v in sorted(mine, key=lambda v: int(v.version))]

    def served_k(self, number: str) -> list[int]:
        """K by batch size that a promotion of the version chose; [] if it chose none."""
        return json.loads(self.client.get_model_version(self.model, number).tags.get(K, "[]"))

    def find(self, sha256: str) -> Version | None:
        """The first version of a drafter; None if it was never registered."""
        found = self._search(SHA256, sha256)
        return self.get(min(found, key=int)) if found else None

    def register(self, folder: Path, tags: dict[str, str]) -> Version:
        """The version of this drafter: the one with its identity, or a new one.

        `tags` (with SHA256 and FIELDS) are also set on a known version, since the latest evaluation
        counts. Its artifacts are checked, and uploaded again if they are damaged. Raises ValueError
        if an upload cannot be read back.
        """
        tags = {name: cut(value, MAX_TAG) for name, value in tags.items()}
        known = self.known(folder, tags[SHA256])
        if known is None:
            run_id, source = self._upload(folder, tags[SHA256])
            self._check_lease()
            self._create_model()
            made = self.client.create_model_version(
                self.model, source, run_id=run_id, tags=tags, await_creation_for=0
            )
            number = str(made.version)
        else:
            number = known.number
            self._mend(known, folder, tags[SHA256])
            self._check_lease()
            for name, value in tags.items():
                self.client.set_model_version_tag(self.model, number, name, value)
        found = self.get(number)
        assert found is not None
        return found

    def set_alias(self, alias: str, version: Version) -> None:
        """Point an alias at a version."""
        self._check_lease()
        self.client.set_registered_model_alias(self.model, alias, version.number)

    def drop_alias(self, alias: str, version: Version) -> None:
        """Remove an alias if it names this version."""
        found = self.current(alias)
        if found is not None and found.number == version.number:
            self._check_lease()
            self.client.delete_registered_model_alias(self.model, alias)

    def mark_bad(self, version: Version, reason: str) -> None:
        """Tag a version so that no gate accepts it again."""
        self._check_lease()
        self.client.set_model_version_tag(self.model, version.number, BAD, cut(reason, MAX_TAG))

    def open(self, version: Version) -> Path:
        """The local folder of a version, downloaded if it is remote. Raises ValueError naming the
        folder if it is gone or does not hold the registered drafter.
        """
        hint = (
            f"version {version.number} of {self.model} cannot be used: restore the folder, "
            "or `flywheel rollback`"
        )
        folder = _local(version.source)
        if folder is None:
            cache = self.cfg.path("downloads", version.sha256[:16])
            cached = next(cache.glob("[!.]*"), None)
            if cached is not None and _same(cached, version):
                return cached
            try:
                folder = self._download(version.source, cache)
            except (MlflowFault, OSError) as error:
                raise ValueError(f"{version.source}: {error}; {hint}") from error
        if not folder.is_dir():
            raise ValueError(f"{folder} is gone; {hint}")
        if not _same(folder, version):
            raise ValueError(
                f"{folder} holds another drafter than was registered ({version.sha256[:12]}); "
                f"{hint}"
            )
        return folder

    def _check_lease(self) -> None:
        assert self.held is not None, "this registry was opened to be read"
        self.held.check()

    def _known(self, folder: Path, sha256: str) -> str | None:
        """The first version of this drafter. A version that has only the hash of the weights counts
        if its folder holds this drafter; so one that was marked bad stays bad.
        """
        found = self._search(SHA256, sha256) or [
            number
            for number in self._search(OLD_SHA256, file_sha256(folder / WEIGHTS))
            if (version := self.get(number)) is not None and version.sha256 == sha256
        ]
        return min(found, key=int) if found else None

    def _search(self, tag: str, value: str) -> list[str]:
        query = f"{equals('name', self.model)} and {equals(f'tags.`{tag}`', value)}"
        found = self.client.search_model_versions(query)
        return [str(v.version) for v in found if v.name == self.model and v.tags[tag] == value]

    def _mend(self, version: Version, folder: Path, sha256: str) -> None:
        """Upload the artifacts of a version again if they are not this drafter any more. Raises
        ValueError if they would end up in another place.
        """
        if self._stored(version.source, sha256) == sha256:
            return
        source = self._upload(folder, sha256)[1]
        if source != version.source:
            raise ValueError(
                f"version {version.number} of {self.model} is this drafter, but {version.source} "
                f"is gone or damaged, and {folder} is kept elsewhere ({source}): restore it, or "
                f"name the folder {Path(version.source).name}, as it was, and run the command again"
            )

    def _upload(self, folder: Path, sha256: str) -> tuple[str, str]:
        """Upload the files and read them back; returns (run id, source). Complete artifacts are not
        uploaded again. Raises ValueError if what was read back is not this drafter.
        """
        run_id = run_named(self.client, self.cfg, folder.name)
        where = f"drafters/{sha256[:16]}/{plain(folder.name)}"
        root = str(self.client.get_run(run_id).info.artifact_uri)
        source = f"{root.rstrip('/')}/{where}"
        files = engine_files(folder)
        there = {Path(f.path).name: f.file_size for f in self.client.list_artifacts(run_id, where)}
        if there != {file.name: file.stat().st_size for file in files} or (
            self._stored(source, sha256) != sha256
        ):
            for file in files:
                self.client.log_artifact(run_id, str(file), where)
            found = self._stored(source, sha256)
            if found != sha256:
                raise ValueError(
                    f"{source} holds {found[:12] or 'no drafter'} after the upload of {folder} "
                    f"({sha256[:12]}): nothing was registered; check the artifact store of "
                    f"{self.cfg.mlflow_uri}, then run the same command again"
                )
        return run_id, source

    def _stored(self, source: str, sha256: str) -> str:
        """The identity of the drafter at `source`, computed from its files; empty without one."""
        folder = _local(source) or self._download(source, self.cfg.path("downloads", sha256[:16]))
        try:
            return drafter_sha256(folder)
        except (ValueError, OSError):
            return ""

    def _download(self, source: str, cache: Path) -> Path:
        """Download `source` into `cache`, under a lock: one process at a time writes there."""
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / ".lock", "a") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            partial = cache / ".partial"  # a killed download leaves it
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            with told(self.cfg.mlflow_uri):
                found = Path(
                    mlflow.artifacts.download_artifacts(
                        source, dst_path=str(partial), tracking_uri=self.cfg.mlflow_uri
                    )
                )
            folder = cache / found.name
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(found, folder)
            shutil.rmtree(partial, ignore_errors=True)
        return folder

    def _create_model(self) -> None:
        try:
            self.client.create_registered_model(self.model)
        except MlflowFault as error:
            if error.code != "RESOURCE_ALREADY_EXISTS":
                raise


def _local(source: str) -> Path | None:
    """The path of a source that is a local folder; None for a remote one."""
    parts = urlparse(source)
    if parts.scheme not in ("", "file"):
        return None
    return Path(unquote(parts.path) if parts.scheme else source)


def _same(folder: Path, version: Version) -> bool:
    """Whether a folder holds the drafter that was registered."""
    try:
        if not version.old:
            return drafter_sha256(folder) == version.sha256
        # Registered before the identity covered config.json: compare its fields with the tags.
        fields = compat_fields(read_config(folder), version.compat.get("target_id", ""))
        known = json.loads(json.dumps(fields))
        return file_sha256(folder / WEIGHTS) == version.sha256 and all(
            known.get(name) == value for name, value in version.compat.items()
        )
    except (ValueError, OSError):
        return False


def opened(cfg: Config) -> Registry | None:
    """The registry, to be read; None if nothing was ever registered in its SQLite file. Opening a
    client would create that file.
    """
    file = sqlite_file(cfg)
    return None if file is not None and not file.exists() else Registry(cfg)


def served_k(cfg: Config, number: str) -> list[int]:
    """K by batch size that the promotion of a version chose; [] if it chose none."""
    registry = opened(cfg)
    return registry.served_k(number) if registry else []


def resolve(cfg: Config, name: str) -> tuple[str, Path] | None:
    """(version number, local folder) of an alias or a version number, its drafter verified.

    None when there is no such alias ("no champion yet"). Raises ValueError for a number that does
    not exist, and for a folder that is gone or was changed.
    """
    registry = opened(cfg)
    if registry is None:
        return None
    version = registry.get(name) if name.isdigit() else registry.current(name)
    if version is None:
        if name.isdigit():
            raise ValueError(f"{cfg.mlflow.model} has no version {name}")
        return None
    return version.number, registry.open(version)
