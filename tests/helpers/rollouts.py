"""A registry with drafters, and fake replicas that serve them, for tests of roll-outs."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.checkpoint import drafter_sha256
from dflash.identity import target_id
from jobs import rollout
from jobs.base.config import Config, load
from store import promotions
from tests.helpers.fake_replica import TOKEN, FakeReplica, running
from tests.helpers.promotion import make_registry, promoted

FAST = ["rollout.poll=0.05", "rollout.wait=40", "rollout.window=100000", "rollout.timeout=5"]
LOOSE = ["rollout.max_loss=0.15", "rollout.max_slice_loss=0.25"]
"""Tolerances that some hundred answers can exclude."""


@dataclass
class World:
    cfg: Config
    fakes: list[FakeReplica]
    sha: dict[str, str]  # by version

    def run(self) -> dict[str, Any]:
        return rollout.run(self.cfg)

    def loaded(self) -> list[str]:
        """The version each replica drafts with."""
        return [fake.active["version"] if fake.active else "none" for fake in self.fakes]

    def actions(self, prefix: str = "rollout-") -> list[tuple[str, str]]:
        """(action, version) of every decision, without measurements."""
        rows = promotions.read(self.cfg.table("promotions"))
        return [
            (r["action"].removeprefix(prefix), r["to_version"])
            for r in rows
            if not r["action"].endswith(("measure", "refuse"))
        ]


def make_base(folder: Path, database: Path) -> Path:
    """A work folder whose registry has two versions; the second is champion."""
    cfg = make_registry(folder / "base", database)
    promote_two(cfg)
    return cfg.path()


def promote_two(cfg: Config) -> None:
    """Two versions; the second is champion."""
    first, _ = promoted(cfg, "d1", 1)
    promoted(cfg, "d2", 2, against=first)


@contextmanager
def world(
    folder: Path, base: Path, chances: Sequence[dict[str, float]], **more: Any
) -> Iterator[World]:
    """A `fleet` beside a copy of the registry of `make_base`."""
    work = shutil.copytree(base, folder / "work")
    with fleet([f"work={work}"], folder, chances, **more) as one:
        yield one


@contextmanager
def fleet(
    where: Sequence[str],
    folder: Path,
    chances: Sequence[dict[str, float]],
    replicas: int = 2,
    settings: Sequence[str] = (),
    serving: str = "1",
    dns: str = "",
) -> Iterator[World]:
    """A fleet that drafts with version `serving` (empty: none), beside the registry of
    `promote_two` that the settings `where` lead to, whose champion is version 2.

    `chances[i]`: true chance of each draft of version i + 1, by domain. `dns`: a name that the
    roll-out is given instead of URLs; the test makes it known.
    """
    cfg = load(None, where)
    (folder / "token").write_text(TOKEN)
    sha = {str(i): drafter_sha256(cfg.path("drafters", f"d{i}")) for i in (1, 2)}
    known = {sha[str(i)]: chance for i, chance in enumerate(chances, 1)}
    active = None
    if serving:
        active = {"version": serving, "sha256": sha[serving], "parameters_sha256": "", "tensors": 1}
        active["compat"] = {"target_id": target_id(cfg.target_path)}
    fakes = [
        FakeReplica(f"r{i}", target_id(cfg.target_path), known, active, seed=i)
        for i in range(replicas)
    ]
    with running(*fakes, one_port=bool(dns)) as urls:
        port = urls[0].rpartition(":")[2]
        known_as = f"rollout.dns={dns}:{port}" if dns else f"rollout.replicas=[{','.join(urls)}]"
        more = [known_as, f"rollout.token_file={folder / 'token'}"]
        cfg = load(None, [*where, *more, *FAST, *LOOSE, *settings])
        yield World(cfg, fakes, sha)
