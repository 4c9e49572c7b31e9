"""The whole configuration: one frozen section per stage, loaded from YAML and `section.key=value`.

    flywheel config                              # every key, its default and meaning, as YAML
    flywheel train --config my.yaml train.steps=200

Defaults live in jobs/base/sections, those by the size of the target in jobs/base/profiles.py.
Unknown keys and wrong types are refused by name.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from jobs.base.profiles import PROFILES, profile_of
from jobs.base.sections.data import Cache, Demo, Gc, Harvest, Ingest, Regenerate, Select
from jobs.base.sections.environment import Mlflow, Ray, Target
from jobs.base.sections.judging import Evaluate, Preflight, Promote, Rollback, Sql, Ui
from jobs.base.sections.retraining import Retrain, Watch
from jobs.base.sections.rolling_out import Rollout
from jobs.base.sections.serving import Fleet, Methods, Serve, Verify
from jobs.base.sections.training import Convert, Drafter, Train
from jobs.base.settings import (
    build,
    flatten,
    parse_overrides,
    read_yaml,
    setting,
    to_yaml,
)
from store.files import exclusive
from store.place import Place, place_of
from store.schemas import TABLES
from store.tables import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything a run depends on. Stages read it, nothing writes to it."""

    work: str = setting(
        "runs/demo",
        "folder of every product of a run: on a local disk, or a URL (s3://, gs://, az://)",
        path=True,
    )
    scratch: str = setting(
        "",
        "local folder of logs, databases and states being written; empty: work, or for a URL "
        "runs/ and the last part of work",
        path=True,
    )
    profile: Literal["auto", "small", "8b", "70b"] = setting(
        "auto", "defaults for a target of this size; auto: by the bytes of its weights"
    )
    target: Target = field(default_factory=Target)
    ray: Ray = field(default_factory=Ray)
    mlflow: Mlflow = field(default_factory=Mlflow)
    ingest: Ingest = field(default_factory=Ingest)
    regenerate: Regenerate = field(default_factory=Regenerate)
    select: Select = field(default_factory=Select)
    harvest: Harvest = field(default_factory=Harvest)
    cache: Cache = field(default_factory=Cache)
    gc: Gc = field(default_factory=Gc)
    drafter: Drafter = field(default_factory=Drafter)
    train: Train = field(default_factory=Train)
    convert: Convert = field(default_factory=Convert)
    evaluate: Evaluate = field(default_factory=Evaluate)
    preflight: Preflight = field(default_factory=Preflight)
    promote: Promote = field(default_factory=Promote)
    rollback: Rollback = field(default_factory=Rollback)
    rollout: Rollout = field(default_factory=Rollout)
    retrain: Retrain = field(default_factory=Retrain)
    watch: Watch = field(default_factory=Watch)
    serve: Serve = field(default_factory=Serve)
    fleet: Fleet = field(default_factory=Fleet)
    demo: Demo = field(default_factory=Demo)
    verify: Verify = field(default_factory=Verify)
    methods: Methods = field(default_factory=Methods)
    sql: Sql = field(default_factory=Sql)
    ui: Ui = field(default_factory=Ui)

    def __post_init__(self) -> None:
        if "://" in self.scratch:
            raise ValueError(f"scratch = {self.scratch!r}: it must be a folder on a local disk")
        if found := [c for c in f"{self.work}{self.path()}" if c in "%?#"]:
            raise ValueError(
                f"work = {self.work!r}: MLflow and object stores read this path as a part of URIs, "
                f"where {found[0]} has a meaning: choose a folder without it"
            )

    def override(self, section: str, **values: Any) -> "Config":
        """A copy with some values of one section replaced."""
        return replace(self, **{section: replace(getattr(self, section), **values)})

    def path(self, *parts: str) -> Path:
        """The absolute path of something in the scratch folder: logs, databases, states."""
        folder = self.scratch
        if not folder:
            name = self.work.rstrip("/").rpartition("/")[2]
            folder = f"runs/{name}" if self.is_remote else self.work
        return Path(folder).expanduser().absolute().joinpath(*parts)

    def place(self, *parts: str) -> Place:
        """A product of the run: something below `work`."""
        return Place(place_of(self.work).root, "/".join(parts))

    def table(self, name: str) -> Table:
        """A narrow table of the run, one of store.schemas.TABLES."""
        return Table(self.place(name), TABLES[name])

    @property
    def is_remote(self) -> bool:
        """Whether the products are in a bucket."""
        return "://" in self.work

    @property
    def target_path(self) -> Path:
        """Folder of the target; of one in a bucket, a copy in the scratch folder."""
        if "://" in self.target.path:
            return _fetched(self.target.path, self.path("targets"))
        return Path(self.target.path) if self.target.path else self.path("target")

    @property
    def mlflow_uri(self) -> str:
        """MLflow tracking and registry URI."""
        return self.mlflow.uri or f"sqlite:///{self.path('mlflow.db')}"

    @property
    def mlflow_artifacts(self) -> str | None:
        """MLflow artifact root, a URI or an absolute path; None: where the MLflow server says."""
        if self.mlflow.artifacts or self.mlflow_uri.startswith(("http://", "https://")):
            return self.mlflow.artifacts or None
        return str(self.path("mlartifacts"))


def load(file: Path | str | None = None, overrides: Sequence[str] = ()) -> Config:
    """Defaults, those of the profile, the YAML `file`, `overrides` such as "train.steps=200"; the
    last wins.

    Raises:
        ValueError: an unknown key, a wrong type or an impossible value, named with what to write.
        OSError: `file` cannot be read.
    """
    given = flatten(Config, read_yaml(Path(file)) if file else {})
    given |= parse_overrides(Config, overrides)
    cfg = build(Config, PROFILES[taken_profile(build(Config, given))] | given)
    # Like every path, it starts at the folder of the command, also for a worker elsewhere.
    return replace(cfg, scratch=str(cfg.path())) if cfg.is_remote and not cfg.scratch else cfg


@lru_cache
def _fetched(url: str, cache: Path) -> Path:
    """A copy of a folder in a bucket; of several processes, one copies it."""
    while True:
        with exclusive(cache / ".lock", "another process") as other:
            if not other:
                return place_of(url).fetch(cache)
        time.sleep(0.5)


def taken_profile(cfg: Config) -> str:
    """The profile whose defaults `cfg` has."""
    if cfg.profile != "auto":
        return cfg.profile
    return profile_of(cfg.target.path or cfg.target_path)


def commented(cfg: Config) -> str:
    """`cfg` as YAML for a file of settings. Defaults that depend on the size of the target are
    comments, so that the file also fits a target of another size.
    """
    values = flatten(Config, asdict(cfg))
    names = {name for profile in PROFILES.values() for name in profile}
    taken = flatten(Config, asdict(Config(work=cfg.work)))
    taken |= PROFILES[taken_profile(cfg)]
    return to_yaml(cfg, [name for name in names if values[name] == taken[name]])
