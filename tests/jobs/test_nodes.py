"""Harvest and training on nodes that share nothing but a bucket; nodes that are killed; commands
that no node can hold; a command that is submitted.
"""

import json
import shutil

import pytest
import torch

from dflash.checkpoint import load_drafter
from jobs import train
from jobs.base.config import Config, load
from jobs.dataset import samples
from jobs.dataset.samples import features_place
from store.place import place_of
from tests.helpers import mlflow_server, nodes
from tests.helpers.harvesting import all_rows
from tests.helpers.nodes import wait_until
from tests.helpers.work import SETTINGS, configure, in_one_process

# By hand, until they have passed on a quiet machine: on a busy one Ray's nodes do not start within
# the 30 s that it gives them.
pytestmark = pytest.mark.hours
RUN = ["train.steps=24", "train.val_every=12", "train.checkpoint_every=6", "train.batch_size=4"]
STAGES = """
import sys
from jobs.base import cli
for stage in sys.argv[1].split(","):
    if code := cli.main([stage, *sys.argv[2:]]):
        sys.exit(code)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory, empty_database):
    with mlflow_server.running(tmp_path_factory.mktemp("mlflow"), empty_database) as url:
        yield url


@pytest.fixture(scope="module")
def cluster(s3):
    with nodes.running(s3.env, 2) as found:
        yield found


@pytest.fixture
def words(s3_env, harvested, cluster, server, tmp_path):
    """Settings of a work place with selected traffic; the target is in the bucket, too."""
    url, target = s3_env.url(), s3_env.url("target")
    for part in ("traffic", "selection"):
        place_of(f"{url}/{part}").publish(harvested / part, "")
    place_of(target).publish(harvested / "target", "")
    found = [f"work={url}", f"scratch={tmp_path / 'driver'}", f"target.path={target}", *SETTINGS]
    found += [*RUN, f"ray.address={cluster.address}", f"mlflow.uri={server}"]
    return [*found, "harvest.workers=2", "train.workers=2", "harvest.samples_per_shard=4"]


@pytest.fixture(scope="module")
def expected(harvested, tmp_path_factory, ray_cluster):
    """Features, and the drafter that one worker trains on them."""
    work = shutil.copytree(harvested, tmp_path_factory.mktemp("one") / "work")
    cfg = configure(work, *RUN)
    with in_one_process():
        summary = train.run(cfg)
    return features(cfg), summary["name"], load_drafter(summary["folder"]).state_dict()


def features(cfg: Config) -> dict[str, torch.Tensor]:
    """The features of every sample."""
    rows = all_rows(cfg)
    found = samples.with_features(cfg, rows)
    return {row["sample_id"]: one.features for row, one in zip(rows, found, strict=True)}


def check_same(cfg: Config, expected, tmp_path) -> None:
    """Features bit for bit; weights up to float order: two workers add in another order."""
    known, name, weights = expected
    found = features(cfg)
    assert found.keys() == known.keys()
    assert all(torch.equal(one, known[key]) for key, one in found.items())
    assert len(cfg.table("set_aside").read()) == 0
    drafter = load_drafter(cfg.place("drafters", name).fetch(tmp_path / "fetched")).state_dict()
    for key, tensor in drafter.items():
        torch.testing.assert_close(tensor, weights[key], rtol=0.02, atol=2e-3)


@pytest.mark.timeout(900)
def test_an_engine_and_a_rank_on_each_of_two_nodes_give_what_one_gives(
    cluster, words, expected, tmp_path
):
    said = tmp_path / "said"
    assert cluster.command(said, STAGES, "harvest,train", *words).wait(800) == 0, said.read_text()
    for node in cluster.others:
        assert node.holds("targets/*/*/config.json"), "an engine was here"
        assert node.holds("training_data/tokens-*"), "and a rank"
    check_same(load(None, words), expected, tmp_path)


@pytest.mark.timeout(300)
def test_what_no_node_can_hold_is_refused_at_once(cluster, words, tmp_path):
    said = tmp_path / "said"
    for stage, more in (("harvest", "harvest.workers=3"), ("harvest", "target.device=cuda")):
        assert cluster.command(said, STAGES, stage, *words, more).wait(250) == 2
        message = said.read_text()
        assert "do not fit: Ray has 2 nodes of 1 CPUs, 1 node of 0 CPUs, room for" in message
    assert "Set target.device=cpu, or start more or larger nodes" in message


@pytest.mark.timeout(300)
def test_a_stage_is_submitted_with_its_code(cluster, words, tmp_path):
    """The node has another working folder, and this package's code only by what is sent."""
    said = tmp_path / "said"
    command = ["--submit", cluster.dashboard, *words, "harvest.workers=1"]
    assert cluster.command(said, STAGES, "harvest", *command).wait(250) == 0, said.read_text()
    lines = said.read_text().splitlines()
    assert "MiB (dflash/ " in " ".join(lines)
    [summary] = [json.loads(line) for line in lines if line.startswith('{"stage"')]
    assert summary["samples"] == 48
    refused = ["--submit", cluster.dashboard, *words, "work=here"]
    assert cluster.command(said, STAGES, "harvest", *refused).wait(100) == 2
    assert "work=" in said.read_text()


@pytest.mark.timeout(1800)
def test_nodes_are_killed_and_the_result_is_that_of_an_undisturbed_run(
    cluster, words, expected, tmp_path
):
    """Once during harvest and once during training; others take over."""
    said, cfg = tmp_path / "said", load(None, words)
    for _ in range(2):
        cluster.add()
    words = [*words, "harvest.samples_per_shard=1"]
    process = cluster.command(said, STAGES, "harvest,train", *words)

    def kill_one(actor: str) -> None:
        node = next(node for node in cluster.others if node.runs(actor))
        node.kill()

    wait_until(lambda: any(features_place(cfg).objects()), process, said)
    kill_one("Engine")
    states = cfg.place("runs", expected[1])
    wait_until(lambda: any("step-" in f.name for f in states.objects()), process, said)
    kill_one("RayTrainWorker")
    assert process.wait(1200) == 0, said.read_text()
    assert "an engine ended" in said.read_text()
    assert "they are placed anew" in said.read_text()
    check_same(cfg, expected, tmp_path)
