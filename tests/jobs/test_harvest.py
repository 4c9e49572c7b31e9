"""Harvest: a bad sample is set aside, too many of them are an error, finished work is kept."""

import json
import shutil
from datetime import UTC, datetime

import pyarrow as pa
import pytest
import torch

from dflash.decode import decode
from dflash.identity import target_id
from dflash.sampling import Sampling
from dflash.target_model import Features, load_target
from jobs import harvest, ingest
from jobs.base.target_facts import target_taps
from jobs.dataset import samples
from jobs.dataset.queries import ask
from jobs.harvesting import actors, harvester
from jobs.harvesting.screening import Fault, screen
from store import files
from store.features import features_row, open_shard
from store.schemas import SET_ASIDE
from store.shards import read_manifests, shard_info, shard_paths, write_manifest, write_shard
from store.traffic_table import read_traffic
from tests.helpers.tiny import greedy_answers, make_target
from tests.helpers.work import configure, record

DTYPES = ["float32", "bfloat16"]
NUM = 24


def prompts_of(num, seed=3):
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(1, 90, (num, 6), generator=drawn).tolist()


def write_log(folder, records, name="log.jsonl"):
    (folder / "capture").mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in records)
    (folder / "capture" / name).write_text(text)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(folder of the target, folder of another model of the same vocabulary)."""
    folder = tmp_path_factory.mktemp("models")
    return make_target(folder / "own"), make_target(folder / "other", "qwen3")


@pytest.fixture
def in_process(monkeypatch):
    """Run without Ray: an actor takes seconds to start. `harvested` (tests/conftest.py) has it."""
    monkeypatch.setattr(actors, "by_actors", here)


def here(cfg, folder, chunks):
    worker = harvester.Harvester(cfg, 1)
    for chunk in chunks:
        yield worker.shard(folder, chunk.to_pylist())


@pytest.fixture(params=DTYPES)
def mine(request, models, tmp_path, in_process):
    """(configuration, target, other model) of a new work folder, computing in one dtype."""
    own, other = (load_target(folder, getattr(torch, request.param)) for folder in models)
    words = [f"target.path={models[0]}", f"target.dtype={request.param}"]
    return configure(tmp_path, *words, "harvest.samples_per_shard=8"), own, other


def plain(own, num=NUM, first=0):
    """Capture records of the target's greedy answers."""
    prompts = prompts_of(first + num)[first:]
    answers = greedy_answers(own, prompts, 20)
    return [record(first + i, *pair) for i, pair in enumerate(zip(prompts, answers, strict=True))]


def by(other, records, **more):
    """The same requests as another model answers them."""
    answers = greedy_answers(other, [r["prompt_ids"] for r in records], 20)
    return [r | {"output_ids": a} | more for r, a in zip(records, answers, strict=True)]


def all_rows(cfg):
    return [row for split in ("train", "val", "test") for row in samples.load_rows(cfg, split)]


def run(cfg):
    ingest.run(cfg)
    return harvest.run(cfg)


def test_an_answer_of_another_model_is_set_aside_and_stops_nothing(mine, tmp_path):
    cfg, own, other = mine
    records = plain(own)
    write_log(tmp_path, [*by(other, records[:1]), *records[1:]])
    found = run(cfg)
    assert (found["samples"], found["set_aside"]) == (NUM - 1, {"other_model": 1})
    [row] = ask(cfg, "select * from set_aside").to_pylist()
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


def test_samples_that_an_engine_spoiled_come_back_with_another_one(mine, tmp_path, monkeypatch):
    """The advice was to change backend or dtype, but the samples were still skipped."""
    cfg, own, other = mine
    records = plain(own)
    write_log(tmp_path, [*by(other, records[:1]), *records[1:]])
    spoiled: list[str] = []

    def spoil(row, features, head):
        wrong = row["domain"] == "b" and len(spoiled) < 2
        spoiled.extend([row["sample_id"]] * wrong)
        return (
            Fault(("constant", "length")[len(spoiled) - 1])
            if wrong
            else screen(row, features, head)
        )

    monkeypatch.setattr(harvester, "screen", spoil)
    generous = cfg.override("harvest", max_reject_rate=0.5)
    assert run(generous)["set_aside"] == {"constant": 1, "length": 1, "other_model": 1}
    assert harvest.run(generous)["samples"] == 0, "the same engine is not asked twice"
    dtype = next(name for name in DTYPES if name != cfg.target.dtype)
    again = harvest.run(generous.override("target", dtype=dtype))
    assert (again["samples"], again["set_aside"]) == (2, {"other_model": 1})
    assert len(samples.set_aside(cfg)) == 1
    [row] = ask(cfg, "select * from set_aside").to_pylist()
    assert (row["backend"], row["dtype"]) == ("transformers", cfg.target.dtype)
    assert len(all_rows(cfg)) == NUM - 1


def test_a_sample_that_an_older_version_set_aside_is_tried_once_more(mine, tmp_path):
    """Its row does not say which engine made the features."""
    cfg, own, _ = mine
    write_log(tmp_path, plain(own))
    ingest.run(cfg)
    folder, key = cfg.path("set_aside"), samples.features_folder(cfg, target_id(cfg.target_path))
    first = read_traffic(cfg.path("traffic"))["sample_id"][0].as_py()
    names = [name for name in SET_ASIDE.names if name not in ("backend", "dtype")]
    row = dict.fromkeys(names) | {"sample_id": first, "features_key": key.name, "reason": "length"}
    old = pa.schema([SET_ASIDE.field(name) for name in names])
    shard = write_shard(folder / "old.parquet", pa.Table.from_pylist([row], schema=old))
    write_manifest(folder, "old", [shard], {"features_key": key.name})
    assert ask(cfg, "select backend from set_aside").to_pylist() == [{"backend": None}]
    assert harvest.run(cfg)["samples"] == NUM
    assert samples.set_aside(cfg) == set()


def test_json_mode_or_a_penalty_in_one_request_ends_nothing(mine, tmp_path):
    cfg, own, other = mine
    records = [r | {"shaped": []} for r in plain(own)]
    write_log(tmp_path, [*by(other, records[:3], shaped=["response_format"]), *records[3:]])
    found = run(cfg)
    assert (found["samples"], found["set_aside"]) == (NUM, {})


def test_sampled_answers_of_another_model_behind_a_gateway_are_seen(mine, tmp_path):
    cfg, own, other = mine
    records = plain(own)
    for i, line in enumerate(records):
        line["temperature"] = 0.7
        writer = other if i % 4 == 0 else own
        sampling = Sampling(temperature=0.7)
        line["output_ids"] = decode(
            writer, line["prompt_ids"], 40, [], sampling=sampling, seed=i
        ).output_ids
    write_log(tmp_path, records)
    with pytest.raises(ValueError, match=r"6 of 24 samples were set aside \(25\.0%.*other_model"):
        run(cfg)
    wrong = {tuple(r["output_ids"]) for r in records[::4]}
    assert len(samples.set_aside(cfg)) == len(wrong) == 6


def test_above_the_rate_the_stage_stops_and_loses_nothing(mine, tmp_path):
    cfg, own, other = mine
    records = plain(own)
    write_log(tmp_path, [*by(other, records[:8]), *records[8:]])
    said = r"8 of 24 samples were set aside \(33\.3%, established above harvest\.max_reject_rate "
    said += r"5\.0%\); mostly other_model \(8\): .*of domain '[ab]'.*target\.path"
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            run(cfg)
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


def test_a_killed_harvest_keeps_its_shards_when_traffic_arrives_in_between(
    mine, tmp_path, monkeypatch
):
    """Shards are chunks of the sorted ids, so new traffic once changed the names of all of them."""
    cfg, own, _ = mine
    write_log(tmp_path, plain(own))
    ingest.run(cfg)

    def killed(cfg, folder, chunks):
        yield from here(cfg, folder, chunks[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(actors, "by_actors", killed)
    with pytest.raises(KeyboardInterrupt):
        harvest.run(cfg)
    monkeypatch.setattr(actors, "by_actors", here)
    folder = samples.features_folder(cfg, target_id(cfg.target_path))
    assert not shard_paths(folder), "nothing is published"
    finished = sum(shard_info(path).rows for path in folder.glob("[!.]*.parquet"))
    assert finished == 16
    write_log(tmp_path, plain(own, 12, first=NUM), "more.jsonl")
    found = run(cfg)
    assert (found["reused"], found["samples"]) == (finished, NUM + 12 - finished)
    assert sum(shard_info(path).rows for path in shard_paths(folder)) == NUM + 12, "each once"
    assert harvest.run(cfg)["samples"] == 0


@pytest.fixture
def features(harvested, tmp_path, in_process):
    """(configuration, features folder) of a new work folder."""
    cfg = configure(shutil.copytree(harvested, tmp_path / "work"))
    return cfg, samples.features_folder(cfg, target_id(cfg.target_path))


def rewrite(folder, change):
    """Change the rows of the first shard as a faulty writer would: its manifest matches."""
    path = shard_paths(folder)[0]
    rows = open_table(path).to_pylist()
    change(rows)
    write_shard(path, pa.Table.from_pylist(rows, schema=open_table(path).schema))
    entry = shard_info(path).entry()
    for manifest in folder.glob("manifests/*.json"):
        found = files.read_json(manifest)
        found["files"] = [entry if e["file"] == path.name else e for e in found["files"]]
        manifest.write_text(json.dumps(found))
    return rows


def open_table(path):
    import pyarrow.parquet as pq

    return pq.ParquetFile(path).read()


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


@pytest.mark.parametrize(("change", "count"), [(nan, 1), (nan_with_its_digest, 1), (exchanged, 2)])
def test_damaged_features_never_reach_tau_and_exactly_they_are_made_again(
    features, change, count, capfd
):
    cfg, folder = features
    everything = all_rows(cfg)
    before = samples.with_features(cfg, everything)
    rewrite(folder, change)
    with pytest.raises(ValueError, match=r"parquet: features of sample \w+ .*flywheel harvest"):
        samples.with_features(cfg, everything)
    found = harvest.run(cfg)
    assert (found["samples"], found["reused"]) == (count, len(everything) - count)
    said = " ".join(capfd.readouterr().err.split())  # long lines are folded
    assert said.count("harvested again") == count + 1
    for old, new in zip(before, samples.with_features(cfg, everything), strict=True):
        torch.testing.assert_close(old.features, new.features, rtol=0.02, atol=0.02)
    assert harvest.run(cfg)["samples"] == 0


def test_features_in_fp8_have_a_folder_of_their_own(features):
    """A sample is found in the dtype that is asked for; in fp8 it is nearly what it is in bf16."""
    exact, folder = features
    cfg = exact.override("harvest", features="fp8")
    everything = all_rows(cfg)
    with pytest.raises(ValueError, match="no features"):
        samples.with_features(cfg, everything)
    found = harvest.run(cfg)
    assert (found["samples"], found["reused"]) == (len(everything), 0)
    assert found["folder"] != str(folder)
    both = [samples.with_features(c, everything) for c in (exact, cfg)]
    for old, new in zip(*both, strict=True):
        error = (old.features.float() - new.features.float()).norm() / old.features.float().norm()
        assert 0 < error < 0.05
    damaged = shard_paths(samples.features_folder(cfg, target_id(cfg.target_path)))[0]
    rewrite(damaged.parent, exchanged)
    assert harvest.run(cfg)["samples"] == 2, "what is damaged is made again"
    assert harvest.run(exact)["samples"] == 0


@pytest.mark.parametrize("cut", [None, 1000])
def test_a_lost_or_cut_shard_is_made_again(features, cut):
    cfg, folder = features
    path = shard_paths(folder)[0]
    rows = shard_info(path).rows
    if cut:
        path.write_bytes(path.read_bytes()[:cut])
    else:
        path.unlink()
    found = harvest.run(cfg)
    assert found["samples"] == rows
    assert len(shard_paths(folder)) == len({p.name for p in shard_paths(folder)}) > 1
    for _ in range(2):  # the same shard, lost again
        shard_paths(folder)[0].unlink()
        assert harvest.run(cfg)["samples"] > 0
        assert len(samples.with_features(cfg, all_rows(cfg))) == len(all_rows(cfg))


def test_what_has_not_changed_is_not_read_again(features, monkeypatch):
    cfg, folder = features
    harvest.run(cfg)
    looked = []
    monkeypatch.setattr(
        "store.shard_repair.find_faults", lambda path, file: looked.append(path) or {}
    )
    harvest.run(cfg)
    assert looked == []
    shard_paths(folder)[0].touch()
    harvest.run(cfg)
    assert looked == [shard_paths(folder)[0]]
    assert len(read_manifests(folder)) == 1


class Short:
    """An engine that refuses a whole batch if one sequence does not fit its context."""

    def __init__(self, target, tokens):
        self.target, self.tokens = target, tokens

    def room(self):
        return self.tokens

    def features(self, batch, taps):
        assert max(map(len, batch)) <= self.tokens
        return self.target.features(batch, taps)


def test_an_answer_that_filled_the_context_does_not_end_the_harvest(mine, tmp_path, monkeypatch):
    cfg, own, _ = mine
    prompts = prompts_of(8, seed=4)
    answers = greedy_answers(own, prompts, 34)
    long = [record(99 + i, *pair) for i, pair in enumerate(zip(prompts, answers, strict=True))]
    write_log(tmp_path, [*plain(own), *long])
    monkeypatch.setattr(harvester, "make_backend", lambda cfg: (Short(own, 39), own.head))
    found = run(cfg)
    assert (found["samples"], found["set_aside"]) == (NUM, {"too_long": 8}), "no rate of it stops"
    row = ask(cfg, "select * from set_aside").to_pylist()[0]
    assert (row["tokens"], json.loads(row["detail"])) == (40, {"tokens": 40, "room": 39})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("planted", [5, 400])
def test_exactly_the_planted_answers_of_2000_are_set_aside(mine, tmp_path, planted):
    cfg, own, other = mine
    cfg = cfg.override("harvest", samples_per_shard=500)
    records = [r | {"shaped": []} for r in plain(own, 2000)]
    wrong = by(other, records[:planted])
    write_log(tmp_path, [*wrong, *records[planted:]])
    started = datetime.now(UTC)
    if planted == 5:
        assert run(cfg)["set_aside"] == {"other_model": 5}
    else:
        with pytest.raises(ValueError, match=r"400 of 2000 samples were set aside \(20\.0%"):
            run(cfg)
    rows = ask(cfg, "select * from set_aside").to_pylist()
    expected = ask(
        cfg,
        "select sample_id from traffic_rows where request_id in "
        f"(select 'r' || i from range({planted}) t(i))",
    )
    assert {r["sample_id"] for r in rows} == {*expected["sample_id"].to_pylist()}
    assert all(r["found_at"] >= started for r in rows)
    folder = samples.features_folder(cfg, target_id(cfg.target_path))
    assert sum(shard_info(path).rows for path in shard_paths(folder)) == 2000 - planted
    taps = list(target_taps(cfg))
    assert open_shard(shard_paths(folder)[0], target_id(cfg.target_path), taps, 32)
