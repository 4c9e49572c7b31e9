"""What the target's folder says about shape, and what is said when traffic/ has nothing of it."""

import pyarrow as pa
import pytest

from dflash.identity import legacy_target_id, target_id
from jobs.config import load
from jobs.shape import none_of_target
from store.schemas import TRAFFIC
from store.shards import write_manifest, write_shard
from tests.tiny import make_target


@pytest.fixture
def cfg(tmp_path):
    make_target(tmp_path / "target")
    return load(None, [f"work={tmp_path}"])


def write_traffic(cfg, *identities):
    rows = [
        dict.fromkeys(TRAFFIC.names)
        | {"sample_id": f"s{i}", "target_id": name, "split": "train", "repeat_count": 1}
        for i, name in enumerate(identities)
    ]
    folder = cfg.path("traffic")
    table = pa.Table.from_pylist(rows, schema=TRAFFIC)
    write_manifest(folder, "m", [write_shard(folder / "a.parquet", table)], {})


def test_traffic_of_the_former_identity_asks_for_ingest_not_for_another_target(cfg):
    former = legacy_target_id(cfg.target_path)
    write_traffic(cfg, former)
    message = str(none_of_target(cfg, "test sample", "ingest more"))
    assert f"under this folder's former id {former}" in message
    assert "run `flywheel ingest` again" in message


@pytest.mark.parametrize("known", [[], ["other"], ["own"], ["own", "former"]])
def test_otherwise_the_stage_says_what_it_lacks(cfg, known):
    names = {"own": target_id(cfg.target_path), "former": legacy_target_id(cfg.target_path)}
    write_traffic(cfg, *(names.get(name, name) for name in known))
    message = str(none_of_target(cfg, "test sample", "ingest more"))
    assert message.endswith(f"has no test sample of target {names['own']}: ingest more")
