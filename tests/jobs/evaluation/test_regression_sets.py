"""Regression sets of a work folder on a disk or in a bucket."""

import json

import pytest
import torch

from dflash.target_model import load_target
from jobs.base.target_facts import target_taps
from jobs.evaluation import regression_sets
from jobs.harvesting import actors, harvester
from tests.helpers.tiny import add_tokenizer, make_target
from tests.helpers.work import TEMPLATE, configure


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = make_target(tmp_path_factory.mktemp("target"))
    add_tokenizer(folder, 97, TEMPLATE)
    return folder


def test_answers_and_their_features_are_kept_beside_the_traffic(
    target, work_url, tmp_path, monkeypatch
):
    """Two sets may have the same sample; nothing needs traffic/ or selection/."""

    def here(cfg, place, chunks, num_chunks):
        yield from (harvester.Harvester(cfg, 1).shard(place, chunk) for chunk in chunks)

    monkeypatch.setattr(actors, "by_actors", here)
    sets = []
    for name, words in (("one", "w5 w9"), ("two", "w5 w9"), ("three", "w7")):
        sets.append(tmp_path / f"{name}.jsonl")
        sets[-1].write_text(json.dumps({"question": words, "answer": "1"}) + "\n")
    cfg = configure(
        work_url,
        f"scratch={tmp_path / 'scratch'}",
        f"target.path={target}",
        f"evaluate.regression=[{','.join(map(str, sets))}]",
        "evaluate.regression_tokens=8",
    )
    found = regression_sets.load_sets(cfg).answered
    assert found.keys() == {"one", "two", "three"}
    own = load_target(target, torch.float32)
    for rows, requests in found.values():
        [row], [request] = rows, requests
        ids = [*row["prompt_ids"], *row["output_ids"]]
        [wanted] = own.features([ids], target_taps(cfg))
        assert request.ids.tolist() == ids
        torch.testing.assert_close(request.features, wanted.taps.bfloat16(), rtol=0.02, atol=0.02)
    names = {one.name for one in cfg.place("regression").objects()}
    assert {name.partition("/")[0] for name in names} == {
        "answers",
        "features",
        "feature_index",
        "leases",
    }
    monkeypatch.setattr(regression_sets, "load_target", None)  # answers come from the store
    monkeypatch.setattr(actors, "by_actors", None)
    again = regression_sets.load_sets(cfg).answered
    assert [rows for rows, _ in again.values()] == [rows for rows, _ in found.values()]
