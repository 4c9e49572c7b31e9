"""The small loop with `work` in a bucket."""

import shutil
from pathlib import Path

import pytest

from jobs import evaluate, promote, sql, train
from jobs.base.config import Config
from store import promotions
from tests.helpers.work import configure, prepare


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
    return configure(url, *settings)


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
    actions = {"promoted": "promote", "refused": "refuse", "held": "hold"}
    assert record["action"] == actions[decided["decision"]]
    other = on(bucket, tmp_path / "two", material)
    again = train.run(other)
    assert (again["name"], again["reused"]) == (trained["name"], True)
    assert evaluate.run(other)["tau"] == evaluation["tau"]
    asked = sql.run(other.override("sql", question="tau_by_domain_and_version"))
    assert asked["num_rows"] > 0
