"""The small loop with `work` in a bucket: every stage, killed anywhere, gives what it gives
alone.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs import evaluate, promote, sql, train
from jobs.base.config import Config
from jobs.dataset.samples import features_place
from store import promotions
from tests.helpers.work import SETTINGS, configure, make_base, prepare

TIMES = {"ingested_at", "found_at", "harvested_at", "started_at", "finished_at", "e_tag", "path"}
"""Columns that differ between two runs of the same work."""


@pytest.fixture(scope="module")
def material(harvested, tmp_path_factory) -> Path:
    """A target, capture logs and an evaluated drafter's shape: what a bucket run starts from."""
    folder = tmp_path_factory.mktemp("material")
    for part in ("target", "capture"):
        shutil.copytree(harvested / part, folder / part)
    return folder


def on(url: str, scratch: Path, material: Path, *more: str) -> Config:
    """A work place with a scratch folder of its own; the capture is copied into that."""
    shutil.copytree(material / "capture", scratch / "capture", dirs_exist_ok=True)
    settings = [f"scratch={scratch}", f"target.path={material / 'target'}", *more]
    return configure(url, *settings)  # pyright: ignore[reportArgumentType]


def content(cfg: Config, name: str) -> list[dict]:
    """The rows of a table but for times, in an order that does not depend on its shards."""
    rows = cfg.table(name).read()
    kept = rows.select([column for column in rows.column_names if column not in TIMES])
    return sorted(kept.to_pylist(), key=lambda row: json.dumps(row, default=str))


@pytest.mark.slow
@pytest.mark.usefixtures("one_process", "ray_cluster")
def test_the_loop_turns_in_a_bucket(bucket, material, tmp_path):
    """Everything that another host needs is in the bucket; a second scratch folder goes on."""
    cfg = on(bucket, tmp_path / "one", material)
    prepare(cfg)
    trained = train.run(cfg)
    assert trained["folder"].startswith("s3://")
    evaluation = evaluate.run(cfg)
    assert evaluation["tau"]["weighted"] >= 1.0
    assert Path(evaluation["report"]).is_file()
    names = {item.name.partition("/")[0] for item in cfg.place().objects()}
    products = {"traffic", "logs", "selection", "feature_index", "features", "acceptance"}
    assert products | {"drafters", "evaluations", "reports", "runs"} <= names
    decided = promote.run(cfg)
    [record] = promotions.read(cfg.table("promotions"))
    assert record["action"] == {"promoted": "promote", "refused": "refuse"}[decided["decision"]]
    other = on(bucket, tmp_path / "two", material)
    again = train.run(other)
    assert (again["name"], again["reused"]) == (trained["name"], True)
    assert evaluate.run(other)["tau"] == evaluation["tau"]
    asked = sql.run(other.override("sql", question="tau_by_domain_and_version"))
    assert asked["num_rows"] > 0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_25_moments_it_is_as_if_undisturbed(s3, bucket, material, tmp_path):
    """SIGKILL during ingest, select, harvest and promote; in the end all tables and features are
    those of a run that nobody killed.
    """
    calm = on(bucket, tmp_path / "calm", material)
    seconds = {stage: timed(calm, stage) for stage in ("ingest", "select", "harvest")}
    stormy = on(s3.url(), tmp_path / "stormy", material)
    luck, kills = random.Random(14), 0
    for stage in ("ingest", "select", "harvest"):
        for _ in range(7):
            kills += killed(stormy, stage, luck.uniform(0.3, 1.0) * seconds[stage])
        timed(stormy, stage)
    for cfg in (calm, stormy):
        make_base(cfg, cfg.path("drafters", "one"))
        place = cfg.place("drafters", "one")
        place.publish(cfg.path("drafters", "one"), "config.json")
        evaluate.run(cfg)
    seconds["promote"] = timed(calm, "promote", expect=(0, 1))
    for _ in range(4):
        kills += killed(stormy, "promote", luck.uniform(0.3, 1.0) * seconds["promote"])
    timed(stormy, "promote", expect=(0, 1))
    for name in ("traffic", "rejects", "logs", "selection", "set_aside"):
        assert content(calm, name) == content(stormy, name), name
    assert features(calm) == features(stormy)
    for cfg in (calm, stormy):
        actions = {record["action"] for record in promotions.read(cfg.table("promotions"))}
        assert len(actions) == 1, "one decision, however often it was interrupted"
    assert kills >= 15, "most of them hit the stage before it ended"


def features(cfg: Config) -> dict[str, tuple]:
    """Tokens and bytes of every sample's features, as stored."""
    place, found = features_place(cfg), {}
    for item in place.objects():
        if item.name.endswith(".parquet"):
            for row in pq.read_table(place.open(item.name)).to_pylist():
                found[row["sample_id"]] = (row["n_tokens"], row["hi"], row["lo"])
    return found


def command(cfg: Config, stage: str) -> list[str]:
    settings = [f"work={cfg.work}", f"scratch={cfg.scratch}", f"target.path={cfg.target.path}"]
    return [sys.executable, "-m", f"jobs.{stage}", *settings, *SETTINGS]


def timed(cfg: Config, stage: str, expect: tuple[int, ...] = (0,)) -> float:
    """Seconds of the undisturbed stage."""
    started = time.perf_counter()
    done = subprocess.run(command(cfg, stage), capture_output=True, text=True, check=False)
    assert done.returncode in expect, done.stderr[-3000:]
    return time.perf_counter() - started


def killed(cfg: Config, stage: str, after: float) -> bool:
    """Start a stage and kill it with all that it started; whether it was still running."""
    process = subprocess.Popen(
        command(cfg, stage),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False
