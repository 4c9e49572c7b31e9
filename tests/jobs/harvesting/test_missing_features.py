"""A harvest that is killed, doubled or overtaken, and what it reads; on a disk and in a bucket."""

import json
import threading
from functools import partial
from itertools import islice

import pyarrow as pa
import pytest
import torch

from dflash.target_model import load_target
from jobs import harvest
from jobs.dataset import samples
from jobs.harvesting import actors, missing_features
from store.lease import lease
from store.schemas import TRAFFIC
from tests.helpers.harvesting import NUM, all_rows, here, listed, plain, run, write_selected
from tests.helpers.work import configure


@pytest.fixture
def planned(models, work_url, tmp_path, in_process):
    """(configuration, target) of a new work folder on a disk or in a bucket; all is selected."""
    more = ["harvest.samples_per_shard=8", f"scratch={tmp_path / 'scratch'}"]
    cfg = configure(work_url, f"target.path={models[0]}", *more)
    own = load_target(models[0], torch.float32)
    write_selected(cfg, plain(own))
    return cfg, own


def kill_after(monkeypatch, num_chunks):
    def killed(*args):
        yield from islice(here(*args), num_chunks)
        raise KeyboardInterrupt

    monkeypatch.setattr(actors, "by_actors", killed)


def test_a_killed_harvest_keeps_its_shards_when_more_is_selected(planned, monkeypatch):
    """New samples once changed the names of all shards."""
    cfg, own = planned
    kill_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        harvest.run(cfg)
    monkeypatch.setattr(actors, "by_actors", here)
    assert len(listed(cfg)) < NUM, "not all is listed"
    found = run(cfg, plain(own, 12, first=NUM))
    assert (found["reused"], found["samples"]) == (16, NUM - 4)
    names = [row["sample_id"] for row in listed(cfg)]
    assert len(names) == len(set(names)) == NUM + 12, "each once"
    assert harvest.run(cfg)["samples"] == 0


def test_an_interrupted_harvest_ends_as_an_undisturbed_one(planned, models, tmp_path, monkeypatch):
    """Killed twice in one run; shards that are not listed yet are adopted."""
    cfg, own = planned
    for _ in range(2):
        kill_after(monkeypatch, 1)
        with pytest.raises(KeyboardInterrupt):
            harvest.run(cfg)
    monkeypatch.setattr(actors, "by_actors", here)
    assert harvest.run(cfg)["reused"] == 16
    words = [f"target.path={models[0]}", "harvest.samples_per_shard=8"]
    other = configure(tmp_path / "other", *words)
    assert run(other, plain(own))["samples"] == NUM
    assert listed(cfg) == listed(other)
    requests = samples.with_features(cfg, all_rows(cfg))
    for one, two in zip(requests, samples.with_features(other, all_rows(other)), strict=True):
        assert torch.equal(one.features, two.features)


def test_only_what_is_selected_is_harvested(planned):
    cfg, _ = planned
    extra = dict.fromkeys(TRAFFIC.names) | {"sample_id": "x", "prompt_ids": [1], "output_ids": [2]}
    cfg.table("traffic").append(pa.Table.from_pylist([extra], schema=TRAFFIC))
    assert harvest.run(cfg)["samples"] == NUM
    assert "x" not in {row["sample_id"] for row in listed(cfg)}


def test_a_selected_sample_that_was_deleted_from_traffic_is_missed(planned):
    cfg, _ = planned
    name = samples.selected(cfg)["sample_id"][3].as_py()
    cfg.table("traffic").replace("sample_id", [name], [])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"1 of 24 samples .* run `flywheel select` again"):
            harvest.run(cfg)
        assert len(listed(cfg)) == NUM - 1, "the others are kept"


def test_two_harvests_at_once_share_the_work(planned):
    """Three at once might delete a shard once."""
    cfg, _ = planned
    found = []
    threads = [threading.Thread(target=lambda: found.append(harvest.run(cfg))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted((one["samples"], one["reused"]) for one in found) == [(0, NUM)] * 2 + [(NUM, 0)]
    assert len(listed(cfg)) == NUM


def test_a_harvest_names_who_holds_the_cache(planned, monkeypatch):
    cfg, _ = planned
    monkeypatch.setattr(missing_features, "lease", partial(lease, wait=0.1))
    place = cfg.place("leases", f"harvest-{samples.features_place(cfg).name}")
    with lease(place), pytest.raises(ValueError, match=r"harvest-.* is held by .*process"):
        harvest.run(cfg)
    assert harvest.run(cfg)["samples"] == NUM


def test_a_harvest_that_was_overtaken_lists_nothing(planned, monkeypatch):
    """It was suspended, its lease ended, and another host took over."""
    cfg, _ = planned
    leases = cfg.place("leases", f"harvest-{samples.features_place(cfg).name}")

    def overtaken(*args):
        yield from here(*args)
        leases.create("00000002.json", json.dumps({"who": "another host", "until": 0.0}).encode())

    monkeypatch.setattr(actors, "by_actors", overtaken)
    monkeypatch.setattr(missing_features, "COMMIT_SECONDS", 60.0)
    with pytest.raises(
        ValueError, match=r"another host may have taken over: nothing was committed"
    ):
        harvest.run(cfg)
    assert listed(cfg) == []
    monkeypatch.setattr(actors, "by_actors", here)
    found = harvest.run(cfg)
    assert (found["samples"], found["reused"]) == (0, NUM), "its finished shards are adopted"


def test_chunks_are_made_as_they_are_taken(planned):
    """The tokens of a whole selection need not fit into memory."""
    cfg, _ = planned
    rows, taken = samples.selected(cfg), []

    def tokens():
        for batch in samples.with_tokens(cfg, rows):
            for i in range(0, len(batch), 3):
                taken.append(batch.slice(i, 3))
                yield taken[-1]

    chunks = missing_features.chunks_of(rows, tokens(), 8)
    first = next(chunks)
    assert (len(first), sum(map(len, taken))) == (8, 9)
    every = pa.concat_tables([first, *chunks])
    assert every.column_names == missing_features.CHUNK
    assert sorted(every["sample_id"].to_pylist()) == rows["sample_id"].to_pylist()
    traffic = cfg.table("traffic").read(missing_features.CHUNK).to_pylist()
    assert sorted(every.to_pylist(), key=str) == sorted(traffic, key=str)
