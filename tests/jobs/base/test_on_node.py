"""What a worker takes from the node that it is on."""

import tempfile

import pytest

from jobs.base import cluster
from jobs.base.config import load, taken_profile
from store.place import place_of


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """This process is a worker on the node `b`."""
    monkeypatch.setattr(cluster, "node_id", lambda: "b")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.mark.usefixtures("elsewhere")
def test_a_worker_has_scratch_of_its_own_node(target, tmp_path):
    words = [f"scratch={tmp_path / 'driver'}", f"target.path={target}"]
    cfg = load(None, ["work=s3://b/w", "ray.address=auto", *words])
    assert cluster.on_node(cfg, "b") is cfg, "on the driver's own node"
    assert cluster.on_node(cfg, "a").path().is_relative_to(tmp_path / "tmp")
    local = load(None, ["work=s3://b/w", *words])
    assert cluster.on_node(local, "a") is local, "a cluster of this machine"
    shared = load(None, [f"work={tmp_path}", "ray.address=auto", *words])
    assert cluster.on_node(shared, "a") is shared, "nodes see the same folders"


@pytest.mark.usefixtures("elsewhere")
def test_a_node_without_the_target_is_named(tmp_path):
    words = ["work=s3://b/w", f"scratch={tmp_path}", f"target.path={tmp_path / 'none'}"]
    cfg = load(None, [*words, "ray.address=auto"])
    with pytest.raises(ValueError, match=r"node [\d.]+ has no target in .*none: put it there on"):
        cluster.on_node(cfg, "a")


def test_a_target_in_a_bucket_is_copied_when_it_is_read(bucket, target, tmp_path):
    place_of(bucket).publish(target, "config.json")
    cfg = load(None, [f"work={tmp_path}", f"target.path={bucket}"])
    assert taken_profile(cfg) == "small"
    assert not (tmp_path / "targets").exists(), "sizes were enough"
    assert (cfg.target_path / "config.json").read_text() == (target / "config.json").read_text()
    assert cfg.target_path.is_relative_to(tmp_path / "targets")
