"""What a run is pinned to: traffic, features and settings that change while it is interrupted."""

import json
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from dflash.decode import decode
from dflash.identity import target_id
from dflash.losses import recorded_token
from dflash.target_model import load_target
from dflash.training_step import generator, rank_picks, step_batch, step_indices
from jobs import harvest, ingest, train
from jobs.dataset import samples
from jobs.training import plan, runs
from jobs.training.feed import LazySamples, feature_cache, training_set, val_rows
from jobs.training.states import RESULT, newest_state, states_folder
from store.features import FeatureCache
from store.files import exclusive
from store.labels import clean
from store.shards import write_shard
from tests.helpers.work import configure, record

pytestmark = pytest.mark.timeout(600)
QUICK = ["train.steps=6", "train.checkpoint_every=3", "train.val_every=3", "train.val_samples=2"]


@pytest.fixture
def fresh(harvested, tmp_path):
    """A work folder of its own, so that equal settings train again."""
    return shutil.copytree(harvested, tmp_path / "work")


def more_traffic(cfg, first=500, labels=("a", "b", "a", "b")):
    """Other conversations in a second log; ingested, not harvested."""
    target = load_target(cfg.target_path, torch.float32)
    with open(cfg.path("capture") / f"log{first}.jsonl", "w") as log:
        for i, label in enumerate(labels, first):
            prompt = torch.randint(1, 90, (6,), generator=generator("more", i)).tolist()
            answer = decode(target, prompt, 20, [0]).output_ids
            log.write(json.dumps(record(i, prompt, answer) | {"domain": label}) + "\n")
    ingest.run(cfg)


def interrupt(cfg, name):
    """Take a finished run back to its first state, as a kill behind it leaves it."""
    states = sorted(states_folder(cfg, name).glob("step-*.pt"))
    assert len(states) == 2
    states[1].unlink()
    (states_folder(cfg, name) / RESULT).unlink()
    shutil.move(cfg.path("drafters", name), cfg.path("whole"))
    return (cfg.path("whole") / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("one_process")
def test_new_traffic_does_not_rename_an_interrupted_run(fresh, capfd):
    """It goes on with what it began with, bit for bit, and says so; the next command starts on all
    that has arrived; fresh=true does so at once."""
    cfg = configure(fresh, *QUICK)
    first = train.run(cfg)
    whole = interrupt(cfg, first["name"])
    more_traffic(cfg)
    planned = train.plan(cfg)["plan"]
    assert (planned["name"], planned["does"]) == (first["name"], "resume")
    assert planned["pinned_to"] == f"{first['samples']} train and {len(live(cfg).val)} val samples"
    assert planned["samples_since"] > 0
    anew = train.plan(configure(fresh, *QUICK, "train.fresh=true"))["plan"]
    assert anew["name"] != first["name"]
    assert anew["does"] == "refuse", "the new samples have no features"
    capfd.readouterr()
    again = train.run(cfg)
    said = " ".join(capfd.readouterr().err.split())
    assert f"run {first['name']} with" in said
    assert "train.fresh=true starts a run with them" in said
    assert (again["name"], again["samples"]) == (first["name"], first["samples"])
    assert (cfg.path("drafters", first["name"]) / "model.safetensors").read_bytes() == whole
    with pytest.raises(ValueError, match="no features"):
        train.run(cfg)
    harvest.run(cfg)
    assert train.plan(cfg)["plan"]["name"] == anew["name"]
    assert train.plan(cfg)["plan"]["does"] == "start"


def live(cfg):
    return runs.live_pin(cfg)


def test_nothing_computed_is_nothing_to_finish(fresh):
    """Killed before its first state, a run of older traffic is not preferred to today's."""
    cfg = configure(fresh, *QUICK)
    shape = plan.run_shape(cfg)
    begun = runs.choose_run(cfg, shape)
    runs.write_pin(cfg, begun, shape)
    more_traffic(cfg)
    assert runs.choose_run(cfg, shape).name != begun.name


def test_a_restarted_worker_reads_the_pin_and_not_the_tables(fresh):
    """Samples without features, of other labels, set aside or harvested anew: same data."""
    cfg = configure(fresh, *QUICK)
    shape = plan.run_shape(cfg)
    begun = runs.choose_run(cfg, shape)
    runs.write_pin(cfg, begun, shape)
    before = training_set(cfg, begun.pin, 4).samples, val_rows(cfg, begun.pin)
    more_traffic(cfg)
    read = runs.read_pin(cfg, begun.name, shape)
    assert runs.missing(cfg, read) == ""
    after = training_set(cfg, read, 4).samples, val_rows(cfg, read)
    assert [s.sample_id for s in before[0]] == [s.sample_id for s in after[0]]
    assert before[1] == after[1]
    assert len(live(cfg).ids()) > len(read.ids())
    path = next(states_folder(cfg, begun.name).glob("pin-*.json"))
    path.write_text(path.read_text().replace('"a"', '"c"'))
    with pytest.raises(ValueError, match=r"damaged .*move the run's folder away"):
        runs.read_pin(cfg, begun.name, shape)


@pytest.mark.usefixtures("one_process")
def test_a_run_does_not_go_on_without_its_samples(fresh, monkeypatch, capfd):
    """Deleted, or set aside by harvest since: said, and a new run starts without them."""
    cfg = configure(fresh, *QUICK)
    first = train.run(cfg)
    interrupt(cfg, first["name"])
    shape, aside = plan.run_shape(cfg), {live(cfg).train[0][0]}
    monkeypatch.setattr(runs, "set_aside", lambda cfg: aside)
    chosen = runs.choose_run(cfg, shape)
    assert chosen.name != first["name"]
    assert f"set aside now, for instance {min(aside)}" in chosen.note
    assert aside.isdisjoint(chosen.pin.ids())
    monkeypatch.setattr(runs, "set_aside", lambda cfg: set())
    read, deleted = runs.read_traffic, live(cfg).val[0][0]
    left = pc.field("sample_id") != deleted
    monkeypatch.setattr(runs, "read_traffic", lambda *args: read(*args).filter(left))
    chosen = runs.choose_run(cfg, shape)
    assert chosen.name != first["name"]
    assert "1 of its samples are not in traffic/ any more" in chosen.note


def test_two_trainings_of_one_run_at_once(fresh):
    """The second is refused by name, at once; the lock goes with its process, even a killed one."""
    cfg = configure(fresh, *QUICK)
    name = runs.choose_run(cfg, plan.run_shape(cfg)).name
    lock = cfg.path("runs", f".{name}.lock")
    held = (
        "import sys; from pathlib import Path; from store.files import exclusive\n"
        "with exclusive(Path(sys.argv[1]), 'ann@host, process 7') as other:\n"
        "    print('held', other, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", held, str(lock)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held \n"
        with pytest.raises(ValueError, match=rf"{name} is being trained by ann@host, process 7"):
            train.run(cfg)
        assert not states_folder(cfg, name).exists(), "nothing was begun"
        process.kill()
    with exclusive(lock, "us") as other:
        assert other == ""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_features_that_cannot_be_read_are_one_message(fresh, workers):
    """A line without a traceback, from whichever rank; repaired, the run goes on."""
    cfg = configure(fresh, *QUICK, f"train.workers={workers}", "train.seed=3")
    spoilt = spoil(cfg)
    with pytest.raises(ValueError, match=spoilt) as refused:
        train.run(cfg)
    assert "\n" not in str(refused.value)
    name = runs.choose_run(cfg, plan.run_shape(cfg)).name
    restore(cfg)
    assert runs.choose_run(cfg, plan.run_shape(cfg)).name == name
    if workers == 1:
        assert train.run(cfg)["name"] == name


def spoil(cfg):
    """Give the last train sample features of another width; returns its id."""
    folder = samples.features_folder(cfg, target_id(cfg.target_path))
    victim = live(cfg).train[-1][0]
    shutil.copytree(folder, cfg.path("kept"))
    for path in folder.glob("[!.]*.parquet"):
        table = pq.read_table(path)
        names = table["sample_id"].to_pylist()
        if victim not in names:
            continue
        tokens = table["n_tokens"].to_pylist()
        row = names.index(victim)
        for plane in ("hi", "lo"):
            bytes_ = table[plane].to_pylist()
            bytes_[row] = bytes_[row][: tokens[row] * 8]
            column = pa.array(bytes_, table.schema.field(plane).type)
            table = table.set_column(table.schema.get_field_index(plane), plane, column)
        size = path.stat().st_size
        info = write_shard(path, table.replace_schema_metadata(pq.read_schema(path).metadata))
        for manifest in folder.glob("manifests/*.json"):
            text = manifest.read_text().replace(f'"bytes": {size}', f'"bytes": {info.bytes}')
            manifest.write_text(text)
    return victim


def restore(cfg):
    folder = samples.features_folder(cfg, target_id(cfg.target_path))
    shutil.rmtree(folder)
    shutil.move(cfg.path("kept"), folder)


def test_features_are_read_once_in_a_step(fresh, monkeypatch):
    """Anchors follow from masks; a cache of one sample must not be asked for it twice."""
    cfg = configure(fresh)
    data = training_set(cfg, live(cfg), 4)
    features = feature_cache(cfg, live(cfg), data.digests, budget=0)
    asked = []
    get = FeatureCache.__getitem__
    monkeypatch.setattr(FeatureCache, "__getitem__", lambda c, n: (asked.append(n), get(c, n))[1])
    samples = LazySamples(data.samples, features)
    for step in range(3):
        picks = step_indices(step, len(samples), 8, 0)
        for forward in rank_picks(picks, data.lengths, 0, 1, 3):
            step_batch(samples, forward, 4, 4, recorded_token, 0)
    assert len(asked) == 3 * 8
    assert sorted(asked[:8]) == sorted(
        data.samples[i].sample_id for _, i in step_indices(0, len(samples), 8, 0)
    )


HOSTILE = ["[/b]", r"$\foo$", "", "x" * 10_000, "a/b'\"`; DROP", "\x1b[31mred"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_labels_of_any_text_train(fresh):
    """Each is the name of a metric, a row of the plan and a curve in the picture."""
    cfg = configure(fresh, *QUICK, "ingest.val_percent=50", "train.seed=9")
    more_traffic(cfg, 900, HOSTILE * 4)
    harvest.run(cfg)
    domains = {row[1] for row in live(cfg).val}
    assert len(domains & set(map(clean, HOSTILE))) >= 3
    train.plan(cfg)
    trained = train.run(cfg)
    assert newest_state(states_folder(cfg, trained["name"])) is not None
