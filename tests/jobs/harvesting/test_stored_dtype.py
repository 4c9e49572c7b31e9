"""harvest.features: bf16 and fp8 live side by side, and a sample is found in the one asked for."""

import shutil

import pytest

from jobs import harvest
from jobs.dataset import samples
from jobs.harvesting import actors, harvester
from tests.helpers.work import configure


def here(cfg, place, chunks, num_chunks):
    """Without Ray: an actor takes seconds to start."""
    worker = harvester.Harvester(cfg, 1)
    for chunk in chunks:
        yield worker.shard(place, chunk)


def test_features_in_fp8_have_a_folder_of_their_own(harvested, tmp_path, monkeypatch):
    monkeypatch.setattr(actors, "by_actors", here)
    exact = configure(shutil.copytree(harvested, tmp_path / "work"))
    cfg = exact.override("harvest", features="fp8")
    everything = [row for s in ("train", "val", "test") for row in samples.load_rows(cfg, s)]
    with pytest.raises(ValueError, match="no features"):
        samples.with_features(cfg, everything)
    found = harvest.run(cfg)
    assert (found["samples"], found["reused"]) == (len(everything), 0)
    both = [samples.with_features(c, everything) for c in (exact, cfg)]
    for old, new in zip(*both, strict=True):
        error = (old.features.float() - new.features.float()).norm() / old.features.float().norm()
        assert 0 < error < 0.05
    assert harvest.run(exact)["samples"] == 0, "the others are as they were"
