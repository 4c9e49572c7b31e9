"""Harvest: a bad sample is set aside, too many of them are an error, finished work is kept."""

import json
import shutil
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from dflash.decode import decode
from dflash.sampling import Sampling
from dflash.target_model import Features, load_target
from jobs import harvest
from jobs.dataset import samples
from jobs.harvesting import harvester
from jobs.harvesting.screening import Fault, screen
from store.feature_index import index_of
from store.features import features_row
from store.schemas import FEATURE_INDEX, SET_ASIDE
from tests.helpers.harvesting import NUM, all_rows, listed, plain, prompts_of, run, write_selected
from tests.helpers.tiny import greedy_answers
from tests.helpers.work import configure, record

DTYPES = ["float32", "bfloat16"]


@pytest.fixture(params=DTYPES)
def mine(request, models, tmp_path, in_process):
    """(configuration, target, other model) of a new work folder, computing in one dtype."""
    own, other = (load_target(folder, getattr(torch, request.param)) for folder in models)
    words = [f"target.path={models[0]}", f"target.dtype={request.param}"]
    return configure(tmp_path, *words, "harvest.samples_per_shard=8"), own, other


def by(other, records, **more):
    """The same requests as another model answers them."""
    answers = greedy_answers(other, [r["prompt_ids"] for r in records], 20)
    return [r | {"output_ids": a} | more for r, a in zip(records, answers, strict=True)]


def aside_of(cfg):
    return cfg.table("set_aside").read().to_pylist()


def test_an_answer_of_another_model_is_set_aside_and_stops_nothing(mine):
    cfg, own, other = mine
    records = plain(own)
    records = [*by(other, records[:1]), *records[1:]]
    found = run(cfg, records)
    assert (found["samples"], found["set_aside"]) == (NUM - 1, {"other_model": 1})
    [row] = aside_of(cfg)
    assert row["domain"] == "a"
    assert row["tokens"] == 26
    numbers = json.loads(row["detail"])
    assert numbers["positions"] == 20
    assert numbers["wrong"] > 10
    assert numbers["score"] > numbers["limit"]
    assert "mention" in numbers["note"], "an old log does not say what shaped the answer"
    assert samples.set_aside(cfg) == {row["sample_id"]}
    again = harvest.run(cfg)
    assert (again["samples"], again["reused"]) == (0, NUM - 1), "it is not tried again"
    assert again["set_aside"] == {"other_model": 1}
    names = [r["sample_id"] for r in all_rows(cfg)]
    assert len(names) == NUM - 1
    assert row["sample_id"] not in names


def test_samples_that_an_engine_spoiled_come_back_with_another_one(mine, monkeypatch):
    """The advice was to change backend or dtype, but the samples were still skipped."""
    cfg, own, other = mine
    records = plain(own)
    records = [*by(other, records[:1]), *records[1:]]
    spoiled = dict(
        zip(sorted(write_selected(cfg, records[1::2])), ("constant", "length"), strict=False)
    )

    def spoil(row, features, head):
        reason = spoiled.pop(row["sample_id"], None)
        return Fault(reason) if reason else screen(row, features, head)

    monkeypatch.setattr(harvester, "screen", spoil)
    generous = cfg.override("harvest", max_reject_rate=0.5)
    write_selected(cfg, records[0::2])
    found = harvest.run(generous)
    assert found["set_aside"] == {"constant": 1, "length": 1, "other_model": 1}
    assert harvest.run(generous)["samples"] == 0, "the same engine is not asked twice"
    dtype = next(name for name in DTYPES if name != cfg.target.dtype)
    again = harvest.run(generous.override("target", dtype=dtype))
    assert (again["samples"], again["set_aside"]) == (2, {"other_model": 1})
    assert len(samples.set_aside(cfg)) == 1
    [row] = aside_of(cfg)
    assert (row["backend"], row["dtype"]) == ("transformers", cfg.target.dtype)
    assert len(all_rows(cfg)) == NUM - 1


def test_a_sample_that_an_older_version_set_aside_is_tried_once_more(mine):
    """Its row does not say which engine made the features."""
    cfg, own, _ = mine
    first = write_selected(cfg, plain(own))[0]
    row = dict.fromkeys(SET_ASIDE.names) | {"sample_id": first, "reason": "length"}
    row |= {"features_key": samples.features_place(cfg).name, "found_at": datetime.now(UTC)}
    cfg.table("set_aside").append(pa.Table.from_pylist([row], schema=SET_ASIDE))
    assert harvest.run(cfg)["samples"] == NUM
    assert samples.set_aside(cfg) == set()


def test_json_mode_or_a_penalty_in_one_request_ends_nothing(mine):
    cfg, own, other = mine
    records = [r | {"shaped": []} for r in plain(own)]
    records = [*by(other, records[:3], shaped=["response_format"]), *records[3:]]
    found = run(cfg, records)
    assert (found["samples"], found["set_aside"]) == (NUM, {})


def test_sampled_answers_of_another_model_behind_a_gateway_are_seen(mine):
    cfg, own, other = mine
    records = plain(own)
    for i, line in enumerate(records):
        line["temperature"] = 0.7
        writer = other if i % 4 == 0 else own
        sampling = Sampling(temperature=0.7)
        line["output_ids"] = decode(
            writer, line["prompt_ids"], 40, [], sampling=sampling, seed=i
        ).output_ids
    with pytest.raises(ValueError, match=r"6 of 24 samples were set aside \(25\.0%.*other_model"):
        run(cfg, records)
    wrong = {tuple(r["output_ids"]) for r in records[::4]}
    assert len(samples.set_aside(cfg)) == len(wrong) == 6


def test_above_the_rate_the_stage_stops_and_loses_nothing(mine):
    cfg, own, other = mine
    records = plain(own)
    records = [*by(other, records[:8]), *records[8:]]
    said = r"8 of 24 samples were set aside \(33\.3%, established above harvest\.max_reject_rate "
    said += r"5\.0%\); mostly other_model \(8\): .*of domain '[ab]'.*target\.path"
    write_selected(cfg, records)
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            harvest.run(cfg)
    generous = cfg.override("harvest", max_reject_rate=0.5)
    assert harvest.run(generous)["reused"] == 16


def test_each_check_names_its_reason(models):
    target = load_target(models[0], torch.float32)
    ids = [1, 2, 3, 4, 5, 6, 7]
    row = {"prompt_ids": ids[:3], "output_ids": ids[3:], "temperature": 0.0, "shaped": ""}
    [found] = target.features([ids], (1, 3))

    def reason(taps, last=found.last):
        fault = screen(row, Features(taps, last), target.head)
        return fault and fault.reason

    large, holes = found.taps.clone(), found.taps.clone()
    large[2, 1] = 3.4e38  # finite in float32, infinite in bfloat16
    holes[2] = 0
    assert reason(found.taps) == "other_model"
    assert reason(found.taps[1:]) == "length"
    assert reason(found.taps, found.last[1:]) == "length"
    assert reason(large) == "not_finite"
    assert reason(found.taps, found.last * float("nan")) == "not_finite"
    assert reason(holes) == "constant"
    assert reason(found.taps[:1].expand(7, -1)) == "constant"


@pytest.fixture
def features(harvested, tmp_path, in_process):
    """(configuration, features place) of a new work folder."""
    cfg = configure(shutil.copytree(harvested, tmp_path / "work"))
    return cfg, samples.features_place(cfg)


def rewrite(cfg, place, change):
    """Change the rows of the first shard as a faulty writer would: sizes and e_tags are listed."""
    name = first_shard(cfg)
    file = pq.ParquetFile(place.open(name))
    rows = file.read().to_pylist()
    change(rows)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=file.schema_arrow), sink)
    place.write(name, bytes(sink.getvalue()))
    index, there = cfg.table("feature_index"), place.head(name)
    old = index.read(where=pc.field("file") == name).to_pylist()
    new = [row | {"file_bytes": there.size, "e_tag": there.e_tag} for row in old]
    index.replace("file", [name], [index.write(pa.Table.from_pylist(new, schema=FEATURE_INDEX))])


def first_shard(cfg):
    return min(row["file"] for row in listed(cfg))


def nan(rows):
    rows[0] |= {"hi": b"\x7f" + rows[0]["hi"][1:], "lo": b"\xc0" + rows[0]["lo"][1:]}


def nan_with_its_digest(rows):
    wrong = torch.full((rows[0]["n_tokens"], 96), float("nan")).bfloat16()
    rows[0] |= features_row(rows[0]["sample_id"], [1], wrong)


def exchanged(rows):
    names = ("hi", "lo", "n_tokens", "digest", "ids_digest")
    first, second = ({name: row[name] for name in names} for row in rows[:2])
    rows[0] |= second
    rows[1] |= first


def read_all(cfg, rows):
    return [request.features for request in samples.with_features(cfg, rows)]


@pytest.mark.parametrize(("change", "count"), [(nan, 1), (nan_with_its_digest, 1), (exchanged, 2)])
def test_damaged_features_never_reach_tau_and_exactly_they_are_made_again(
    features, change, count, capfd
):
    cfg, place = features
    everything = all_rows(cfg)
    harvest.run(cfg)  # the copy has other e_tags
    before = read_all(cfg, everything)
    rewrite(cfg, place, change)
    with pytest.raises(ValueError, match=r"parquet: features of sample \w+ .*flywheel harvest"):
        read_all(cfg, everything)
    found = harvest.run(cfg)
    assert (found["samples"], found["reused"]) == (count, len(everything) - count)
    said = " ".join(capfd.readouterr().err.split())  # long lines are folded
    assert said.count("harvested again") == count + 1
    for old, new in zip(before, read_all(cfg, everything), strict=True):
        torch.testing.assert_close(old, new, rtol=0.02, atol=0.02)
    assert harvest.run(cfg)["samples"] == 0


@pytest.mark.parametrize("cut", [None, 1000])
def test_a_lost_or_cut_shard_is_made_again(features, cut):
    """Also one that comes back under the same name."""
    cfg, place = features
    for _ in range(3):
        name = first_shard(cfg)
        count = sum(row["file"] == name for row in listed(cfg))
        if cut:
            place.write(name, place.read(name)[:cut])
        else:
            place.delete([name])
        assert harvest.run(cfg)["samples"] == count
        assert len(read_all(cfg, all_rows(cfg))) == len(all_rows(cfg))
    assert harvest.run(cfg)["samples"] == 0


class Short:
    """An engine that refuses a whole batch if one sequence does not fit its context."""

    def __init__(self, target, tokens):
        self.target, self.tokens = target, tokens

    def room(self):
        return self.tokens

    def features(self, batch, taps):
        assert max(map(len, batch)) <= self.tokens
        return self.target.features(batch, taps)


def test_an_answer_that_filled_the_context_does_not_end_the_harvest(mine, monkeypatch):
    cfg, own, _ = mine
    prompts = prompts_of(8, seed=4)
    answers = greedy_answers(own, prompts, 34)
    long = [record(99 + i, *pair) for i, pair in enumerate(zip(prompts, answers, strict=True))]
    records = [*plain(own), *long]
    monkeypatch.setattr(harvester, "make_backend", lambda cfg: (Short(own, 39), own.head))
    found = run(cfg, records)
    assert (found["samples"], found["set_aside"]) == (NUM, {"too_long": 8}), "no rate of it stops"
    row = aside_of(cfg)[0]
    assert (row["tokens"], json.loads(row["detail"])) == (40, {"tokens": 40, "room": 39})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("planted", [5, 400])
def test_exactly_the_planted_answers_of_2000_are_set_aside(mine, planted):
    cfg, own, other = mine
    cfg = cfg.override("harvest", samples_per_shard=500)
    records = [r | {"shaped": []} for r in plain(own, 2000)]
    names = write_selected(cfg, [*by(other, records[:planted]), *records[planted:]])
    started = datetime.now(UTC)
    if planted == 5:
        assert harvest.run(cfg)["set_aside"] == {"other_model": 5}
    else:
        with pytest.raises(ValueError, match=r"400 of 2000 samples were set aside \(20\.0%"):
            harvest.run(cfg)
    rows = aside_of(cfg)
    assert {r["sample_id"] for r in rows} == {*names[:planted]}
    assert all(r["found_at"] >= started for r in rows)
    index = index_of(cfg.table("feature_index"), samples.features_place(cfg).name)
    assert sorted(names[planted:]) == index["sample_id"].to_pylist()
