"""Select, harvest and promote with their work in a bucket, killed at random moments: in the end
everything is as if nobody had killed them. Ingest has such a test in ingestion/test_publishing.py.
"""

import multiprocessing
import os
import random
import time
from importlib import import_module

import pyarrow.parquet as pq
import pytest

from jobs import ingest
from jobs.base.config import Config
from jobs.dataset.samples import features_place
from jobs.harvesting import actors
from tests.helpers.harvesting import here
from tests.helpers.promotion import actions, aliases, evaluate, make_drafter, make_registry
from tests.helpers.work import configure

TIMES = {"found_at", "harvested_at", "e_tag"}
"""Columns that differ between two runs of the same work."""

# Children of a process that has imported everything: a kill hits the stage, not its imports.
CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(["jobs.select", "jobs.harvest", "jobs.promote", __name__])


@pytest.fixture(autouse=True)
def imported():
    """The first child waits for the imports."""
    process = CHILDREN.Process(target=time.monotonic)
    process.start()
    process.join()


def child(stage: str, cfg: Config, env: dict[str, str]) -> None:
    """Run a stage without Ray, whose actors take longer to start than all that is tested here."""
    os.environ.update(env)
    actors.by_actors = here
    import_module(f"jobs.{stage}").run(cfg)


class Stage:
    """A stage that runs in processes of its own."""

    def __init__(self, name: str, cfg: Config, env: dict[str, str]) -> None:
        self.name, self.args = name, (name, cfg, env)

    def run(self) -> float:
        """Undisturbed; returns its seconds."""
        started = time.monotonic()
        assert not self.killed(after=100.0), f"{self.name} hangs"
        return time.monotonic() - started

    def killed(self, after: float) -> bool:
        """SIGKILL after so many seconds; whether it was still running."""
        process = CHILDREN.Process(target=child, args=self.args)
        process.start()
        process.join(after)
        running = process.is_alive()
        process.kill()
        process.join()
        assert running or process.exitcode == 0, f"{self.name} failed, see above"
        return running

    def disturbed(self, times: int, seconds: float, luck: random.Random) -> None:
        """Kill it so many times while it runs, then let it end."""
        hits = 0
        for _ in range(5 * times):
            if self.killed(luck.uniform(0.0, seconds)):
                hits += 1
            else:
                seconds *= 0.7  # it runs faster than when it was timed
            if hits == times:
                break
        assert hits == times
        self.run()


def rows(cfg: Config, name: str) -> list[str]:
    """The rows of a table but for times, in an order that does not depend on its shards."""
    found = cfg.table(name).read()
    kept = [column for column in found.column_names if column not in TIMES]
    return sorted(map(repr, found.select(kept).to_pylist()))


def features(cfg: Config) -> dict[str, tuple]:
    """Tokens and bytes of every sample's features, as stored."""
    place, found = features_place(cfg), {}
    for item in place.objects():
        if item.name.endswith(".parquet"):
            for row in pq.read_table(place.open(item.name)).to_pylist():
                found[row["sample_id"]] = (row["n_tokens"], row["hi"], row["lo"])
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_select_and_harvest_killed_and_run_again(s3_env, harvested, tmp_path):
    material = [f"ingest.logs={harvested / 'capture'}", f"target.path={harvested / 'target'}"]

    def on(url: str, scratch: str) -> Config:
        settings = [f"scratch={tmp_path / scratch}", "harvest.samples_per_shard=4"]
        cfg = configure(url, *material, *settings)
        ingest.run(cfg)
        return cfg

    calm, stormy = on(s3_env.url(), "calm"), on(s3_env.url(), "stormy")
    luck = random.Random(14)
    for name, times in (("select", 3), ("harvest", 4)):
        seconds = Stage(name, calm, s3_env.env).run()
        Stage(name, stormy, s3_env.env).disturbed(times, seconds, luck)
    for table in ("traffic", "selection", "set_aside", "feature_index"):
        assert rows(calm, table) == rows(stormy, table), table
    assert len(features(calm)) > 30
    assert features(calm) == features(stormy)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_promote_killed_and_run_again(s3_env, empty_database, tmp_path):
    """Two promotions, one after the other: each is recorded once, and the aliases follow."""
    luck, seconds = random.Random(15), 0.0
    for name in ("calm", "stormy"):
        scratch = tmp_path / name
        settings = [f"scratch={scratch}", f"target.path={scratch / 'target'}"]
        cfg = make_registry(s3_env.url(), empty_database, *settings)
        folder = None
        for seed, drafter in enumerate(("one", "two")):
            before, folder = folder, make_drafter(cfg, drafter, seed)
            evaluate(cfg, folder, against=before)
            place = str(cfg.place("drafters", drafter))
            stage = Stage("promote", cfg.override("promote", drafter=place), s3_env.env)
            if name == "calm":
                seconds = max(seconds, stage.run())
            else:
                stage.disturbed(2, seconds, luck)
        assert actions(cfg) == [("promote", None, "1"), ("promote", "1", "2")], name
        assert aliases(cfg) == {"champion": "2", "previous": "1"}, name
