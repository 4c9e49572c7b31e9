"""What a run is pinned to: traffic, features and settings that change while it is interrupted."""

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dflash.decode import decode
from dflash.identity import target_id
from dflash.losses import recorded_token
from dflash.target_model import load_target
from dflash.training_step import generator, rank_picks, step_batch, step_indices
from jobs import harvest, ingest, select, train
from jobs.base.target_facts import target_config, target_taps
from jobs.dataset.samples import features_place
from jobs.training import loop, plan, runs, states
from jobs.training.feed import (
    LazySamples,
    training_features,
    training_set,
    val_requests,
    val_rows,
)
from jobs.training.mapped import mapped
from jobs.training.states import forget_result, newest_state, states_folder
from store import feature_cache
from store.feature_shards import write_shard
from store.features import features_row
from store.labels import clean
from store.schemas import SET_ASIDE, features_schema
from tests.helpers.work import configure, record

pytestmark = pytest.mark.timeout(600)
QUICK = ["train.steps=6", "train.checkpoint_every=3", "train.val_every=3", "train.val_samples=2"]


@pytest.fixture
def fresh(harvested, tmp_path):
    """A work folder of its own, so that equal settings train again."""
    return shutil.copytree(harvested, tmp_path / "work")


def more_traffic(cfg, first=500, labels=("a", "b", "a", "b")):
    """Other conversations in a second log; ingested and selected, not harvested."""
    target = load_target(cfg.target_path, torch.float32)
    with open(cfg.path("capture") / f"log{first}.jsonl", "w") as log:
        for i, label in enumerate(labels, first):
            prompt = torch.randint(1, 90, (6,), generator=generator("more", i)).tolist()
            answer = decode(target, prompt, 20, [0]).output_ids
            log.write(json.dumps(record(i, prompt, answer) | {"domain": label}) + "\n")
    ingest.run(cfg)
    select.run(cfg)


def interrupt(cfg, name):
    """Take a finished run back to its first state, as a kill behind it leaves it."""
    states = sorted(states_folder(cfg, name).glob("step-*.pt"))
    assert len(states) == 2
    states[1].unlink()
    forget_result(cfg, name)
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
    assert before[1].equals(after[1])
    assert read.versions == begun.pin.versions
    assert live(cfg).versions["selection"] != read.versions["selection"]
    assert ids(live(cfg)) > ids(read)


def test_a_damaged_pin_is_one_message(fresh):
    """Cut short, without versions, of other labels: what it says is not what the run is named."""
    cfg = configure(fresh, *QUICK)
    shape = plan.run_shape(cfg)
    begun = runs.choose_run(cfg, shape)
    runs.write_pin(cfg, begun, shape)
    [path] = states_folder(cfg, begun.name).glob("pin-*.parquet")
    whole, rows = path.read_bytes(), begun.pin.rows
    bare, other = pa.BufferOutputStream(), pa.BufferOutputStream()
    pq.write_table(rows.replace_schema_metadata(None), bare)
    labels = pa.array(["c"] * len(rows))
    place = rows.schema.get_field_index("domain")
    pq.write_table(
        rows.set_column(place, "domain", labels).replace_schema_metadata({runs.VERSIONS: b"{}"}),
        other,
    )
    for damaged in (b"", whole[:300], bytes(bare.getvalue()), bytes(other.getvalue())):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"damaged .*move the run's folder away") as refused:
            runs.read_pin(cfg, begun.name, shape)
        assert "\n" not in str(refused.value)
    path.write_bytes(whole)
    assert runs.read_pin(cfg, begun.name, shape).key == begun.pin.key


def test_a_selection_names_its_run_whatever_comes_later(fresh):
    """By its version, the run of an earlier selection can be had again."""
    cfg = configure(fresh, *QUICK)
    first, shape = live(cfg), plan.run_shape(cfg)
    more_traffic(cfg)
    again = configure(fresh, *QUICK, f"select.version={first.versions['selection']}")
    assert ids(live(again)) == ids(first) < ids(live(cfg))
    names = [runs.run_name(cfg, shape, pin) for pin in (first, live(again), live(cfg))]
    assert names[0] == names[1] != names[2]


def test_ranks_of_a_node_share_their_data(fresh):
    """Both map one file. It is made again if it is deleted, also while it is in use."""
    cfg = configure(fresh)
    pin = live(cfg)
    both = [training_set(cfg, pin, 4).samples for _ in range(2)]
    [path] = cfg.path("training_data").glob("*.arrow")
    where = [one.tokens["ids"].chunk(0).values.buffers()[1].address for one in both]
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [[int(x, 16) for x in m[0].split("-")] for m in maps if m[-1] == str(path)]
    for address in where:
        assert any(start <= address < end for start, end in spans), "it is the file, not a copy"
    known = [sample.ids for sample in both[0]]
    path.unlink()
    again = training_set(cfg, pin, 4).samples
    assert path.is_file()
    assert list(map(torch.Tensor.tolist, known)) == [sample.ids.tolist() for sample in again]
    assert [sample.ids.tolist() for sample in both[1]] == [sample.ids.tolist() for sample in again]


def test_one_of_several_ranks_writes_the_file(tmp_path):
    """They begin together. If the writer dies, another writes."""
    begun, table = [], pa.table({"a": [1, 2]})

    def batches():
        begun.append(1)
        time.sleep(0.5)
        if len(begun) == 1:
            raise OSError("killed")
        return table.to_batches()

    with ThreadPoolExecutor(4) as pool:
        found = [
            pool.submit(mapped, tmp_path / "x" / "a.arrow", table.schema, batches) for _ in range(4)
        ]
    failed = [one.exception() for one in found]
    assert len(begun) == 2
    assert sorted(map(str, failed)) == ["None"] * 3 + ["killed"]
    assert all(one.result().equals(table) for one in found if not one.exception())


@pytest.mark.usefixtures("one_process")
def test_a_run_does_not_go_on_without_its_samples(fresh):
    """Deleted, or set aside by harvest since: said, and a new run starts without them."""
    cfg = configure(fresh, *QUICK)
    first, begun = train.run(cfg), live(cfg)
    interrupt(cfg, first["name"])
    shape, aside = plan.run_shape(cfg), begun.train["sample_id"][0].as_py()
    add_aside(cfg, aside)
    chosen = runs.choose_run(cfg, shape)
    assert chosen.name != first["name"]
    assert f"set aside now, for instance {aside}" in chosen.note
    assert aside not in ids(chosen.pin)
    cfg.table("set_aside").replace("sample_id", [aside], [])
    deleted = begun.val["sample_id"][0].as_py()
    cfg.table("traffic").replace("sample_id", [deleted], [])
    gone = f"1 of its samples are not in traffic/ any more, for instance {deleted}"
    with pytest.raises(ValueError, match=rf"{gone}: run `flywheel select`"):
        train.run(cfg)
    select.run(cfg)
    chosen = runs.choose_run(cfg, shape)
    assert chosen.name != first["name"]
    assert gone in chosen.note
    with pytest.raises(ValueError, match=gone):
        val_requests(cfg, begun)


def add_aside(cfg, name):
    """As harvest sets a sample aside."""
    row = dict.fromkeys(SET_ASIDE.names) | {"sample_id": name, "reason": "not greedy", "tokens": 9}
    row |= {"features_key": features_place(cfg).name, "domain": "a", "detail": "{}"}
    row |= {"target_id": target_id(cfg.target_path), "found_at": datetime.now(UTC)}
    cfg.table("set_aside").append(pa.Table.from_pylist([row], schema=SET_ASIDE))


def ids(pin):
    return set(pin.rows["sample_id"].to_pylist())


def test_two_trainings_of_one_run_at_once(fresh):
    """The second is refused by name, at once; the lease of a killed process is free at once."""
    cfg = configure(fresh, *QUICK)
    name = runs.choose_run(cfg, plan.run_shape(cfg)).name
    place = cfg.place("leases", f"train-{name}")
    held = (
        "import sys; from store.lease import lease; from store.place import Place\n"
        "with lease(Place(*sys.argv[1:])):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", held, place.root, place.key]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        said = rf"{name} is being trained by another command: .* is held by \S+, process"
        with pytest.raises(ValueError, match=rf"{said} {process.pid} "):
            train.run(cfg)
        assert not states_folder(cfg, name).exists(), "nothing was begun"
        process.kill()
    with runs.only_one(cfg, name):
        pass


@pytest.mark.usefixtures("one_process")
def test_a_run_that_another_host_took_over_writes_nothing_more(fresh, monkeypatch):
    """As after its driver was suspended for longer than its lease."""
    cfg = configure(fresh, *QUICK, "train.seed=8")
    name = runs.choose_run(cfg, plan.run_shape(cfg)).name
    real = loop.commit_state

    def taken_over(cfg, name, step, state):
        assert cfg.place("leases", f"train-{name}").create("00000002.json", b"{}")
        return real(cfg, name, step, state)

    monkeypatch.setattr(loop, "commit_state", taken_over)
    with pytest.raises(ValueError, match="has taken over: nothing more was committed"):
        train.run(cfg)
    assert len(list(states_folder(cfg, name).glob("step-*.pt"))) == 1
    assert not cfg.place("drafters", name).has("config.json")
    assert states.read_result(cfg, name) == {}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
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
    """Give a sample of the second step features of another width; returns its id."""
    place, data = features_place(cfg), training_set(cfg, live(cfg), 4)
    picks = step_indices(1, len(data.samples), cfg.train.batch_size, cfg.train.seed)
    sample = data.samples[picks[0][1]]
    schema = features_schema(
        target_id(cfg.target_path), list(target_taps(cfg)), target_config(cfg)["hidden_size"]
    )
    narrow = torch.ones(len(sample.ids), 8).bfloat16()
    row = features_row(sample.sample_id, sample.ids.numpy(), narrow)
    spoilt = write_shard(place, schema, [row])
    index = cfg.table("feature_index")
    index.replace("sample_id", [sample.sample_id], [index.write(spoilt)])
    return sample.sample_id


def restore(cfg):
    """Take back what `spoil` did, the last commit."""
    index = cfg.table("feature_index")
    earlier = index.read(version=index.version() - 1)
    index.change(lambda live: ([index.write(earlier)], list(live)))


def test_features_are_read_once_in_a_step(fresh, monkeypatch):
    """Without a budget, each row group that a step needs is read once, whatever is in it."""
    cfg = configure(fresh, "train.cache_gib=0.0")
    data = training_set(cfg, live(cfg), 4)
    samples = LazySamples(data.samples, training_features(cfg, data))
    read, real = [], feature_cache.read_group
    monkeypatch.setattr(feature_cache, "read_group", lambda *a: (read.append(a), real(*a))[1])
    for step in range(3):
        picks = step_indices(step, len(samples), 8, 0)
        forwards = rank_picks(picks, data.lengths, 0, 1, 3)
        samples.prefetch(i for forward in forwards for _, i in forward)
        for forward in forwards:
            step_batch(samples, forward, 4, 4, recorded_token, 0)
        groups = [(name, group) for _, name, _, group, _ in read]
        assert len(groups) == len(set(groups)) > 0
        read.clear()


HOSTILE = ["[/b]", r"$\foo$", "", "x" * 10_000, "a/b'\"`; DROP", "\x1b[31mred"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_labels_of_any_text_train(fresh):
    """Each is the name of a metric, a row of the plan and a curve in the picture."""
    cfg = configure(fresh, *QUICK, "ingest.val_percent=50", "train.seed=9")
    more_traffic(cfg, 900, HOSTILE * 4)
    harvest.run(cfg)
    domains = set(live(cfg).val["domain"].to_pylist())
    assert len(domains & set(map(clean, HOSTILE))) >= 3
    train.plan(cfg)
    trained = train.run(cfg)
    assert newest_state(cfg, trained["name"]) is not None
