"""What the actors of a harvest ask Ray for, and what happens when they end."""

import json
import os
import time
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch

from jobs.base.placement import Node
from jobs.harvesting import actors
from jobs.harvesting.screening import KILLED
from store.place import place_of
from tests.helpers.work import configure


def engine(behave):
    """In the place of actors.Engine: it imports no torch, and makes of a chunk what behave(names,
    calls before) does. A class in a function is pickled by value.
    """

    class Engine:
        def __init__(self):
            self.calls = 0

        def open(self, cfg, home, threads):
            behave(["open"], 0)
            return home, {"backend": "fake", "dtype": "float32"}

        def shard(self, place, chunk):
            self.calls += 1
            behave(chunk["sample_id"].to_pylist(), self.calls)
            return SimpleNamespace(index=chunk, aside=[])

    return Engine


def chunks_of(*words):
    names = ("sample_id", "domain", "prompt_ids", "output_ids")
    return iter(
        [pa.table(dict(zip(names, ([w], ["a"], [[1]], [[2]]), strict=True))) for w in words]
    )


def share(cfg, *whole, free=None):
    return actors.actor_share(cfg, [*whole], [*(whole if free is None else free)])


def test_actors_ask_for_what_ray_has(tmp_path, monkeypatch):
    """In a container with a CPU limit each actor once asked for more CPUs than Ray had, and waited
    for ever.
    """
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    cfg = configure(tmp_path, "harvest.workers=2")
    assert share(cfg, Node(5)) == {"num_cpus": 2, "num_gpus": 0}
    assert share(cfg, Node(4), Node(4)) == {"num_cpus": 4, "num_gpus": 0}
    assert share(cfg, Node(2, 2)) == {"num_cpus": 1, "num_gpus": 1}
    one = configure(tmp_path)
    assert share(one, Node(1))["num_cpus"] == 1
    assert share(one, Node(3), Node(5))["num_cpus"] == 5, "an actor lives on one node"
    said = "harvest.workers=2 with 1 CPUs each do not fit: Ray has 1 node of 1 CPUs, room for 1. "
    with pytest.raises(ValueError, match=said + "Lower harvest.workers, or raise ray.num_cpus"):
        share(cfg, Node(1))
    said = "with 1 CPUs and 1 GPUs each do not fit: Ray has 1 node of 4 CPUs and 1 GPUs, room for 1"
    with pytest.raises(ValueError, match=said + ".*or set target.device=cpu"):
        share(cfg, Node(4, 1))
    on_cpus = configure(tmp_path, "target.device=cpu")
    assert share(on_cpus, Node(4, 1)) == {"num_cpus": 4, "num_gpus": 0}
    on_gpu = configure(tmp_path, "target.device=cuda")
    with pytest.raises(ValueError, match=r"room for 0\. Set target\.device=cpu, or raise"):
        share(on_gpu, Node(8))


def test_two_engines_share_a_gpu_and_cpus_are_as_set(tmp_path):
    words = ["harvest.workers=4", "harvest.gpus=0.5", "ray.address=auto"]
    cfg = configure(tmp_path, *words)
    assert share(cfg, Node(8, 1), Node(8, 1)) == {"num_cpus": 4, "num_gpus": 0.5}
    cfg = configure(tmp_path, *words, "harvest.cpus=3")
    assert share(cfg, Node(8, 1), Node(8, 1)) == {"num_cpus": 3, "num_gpus": 0.5}
    with pytest.raises(ValueError, match=r"with 3 CPUs and 0.5 GPUs each .* room for 3\. Lower"):
        share(cfg, Node(8, 1), Node(3, 1))
    with pytest.raises(ValueError, match=r"harvest.gpus = 2: an engine computes on one GPU"):
        configure(tmp_path, "harvest.gpus=2")


def test_a_head_node_without_gpus_does_not_make_harvest_wait_for_ever(tmp_path):
    """Actors once asked for 32 CPUs and a GPU each, but the node with the GPUs has 8 CPUs."""
    cfg = configure(tmp_path, "harvest.workers=2", "ray.address=auto")
    assert share(cfg, Node(64), Node(8, 2)) == {"num_cpus": 4, "num_gpus": 1}
    said = "Ray has 1 node of 64 CPUs, 1 node of 1 CPUs and 2 GPUs, room for 1"
    with pytest.raises(ValueError, match=said + ".*or start more or larger nodes"):
        share(cfg, Node(64), Node(1, 2))


def test_a_submitted_command_leaves_a_cpu_of_its_node_to_itself(tmp_path):
    """`ray job submit` gives it one: two actors of 4 CPUs would have waited for it to end."""
    cfg = configure(tmp_path, "harvest.workers=2", "ray.address=auto")
    whole = [Node(4), Node(4)]
    assert share(cfg, *whole, free=[Node(3), Node(4)])["num_cpus"] == 3
    assert share(cfg, *whole, free=[Node(0), Node(0)])["num_cpus"] == 3, "others have all: it waits"


@pytest.fixture
def crew(ray_cluster, tmp_path, target, monkeypatch):
    """crew(behave, words): what two engines make of chunks with one sample each, and what the
    driver has taken.
    """

    def make(behave, words):
        def chunks():
            for chunk in chunks_of(*words):
                taken.append(chunk)
                yield chunk

        taken = []
        monkeypatch.setattr(actors, "Engine", engine(behave))
        cfg = configure(tmp_path, f"target.path={target}", "harvest.workers=2")
        return actors.by_actors(cfg, place_of(str(tmp_path)), chunks(), len(words)), taken

    return make


def test_chunks_wait_until_an_actor_has_room(crew):
    """The driver once put the tokens of all samples into Ray at the start."""
    words = [f"w{i}" for i in range(12)]
    results, taken = crew(lambda names, calls: time.sleep(0.05), words)
    ahead, found = [], []
    for done in results:
        ahead.append(len(taken) - len(found))
        found += done.index["sample_id"].to_pylist()
        time.sleep(0.2)
    assert sorted(found) == sorted(words), "each once"
    assert ahead[0] <= 3


def test_what_ends_engines_is_set_aside_and_a_slow_chunk_holds_up_nothing(crew, capfd):
    """`bad` ends its process. `dead` leaves an engine that cannot go on, but its process lives."""

    def behave(names, calls):
        if names == ["bad"]:
            os._exit(1)
        if names == ["dead"] or calls > 99:
            raise RuntimeError("the engine core is dead")
        time.sleep(10 if names == ["slow"] else 0)

    words = ["slow", "bad", "w1", "dead", "w2", "w3"]
    found, aside = [], []
    for done in crew(behave, words)[0]:
        found += done.index["sample_id"].to_pylist()
        aside += done.aside
    assert sorted(found) == ["slow", "w1", "w2", "w3"]
    assert {row["sample_id"]: row["reason"] for row in aside} == {"bad": KILLED, "dead": KILLED}
    assert all(row["backend"] == "fake" for row in aside)
    [detail] = [json.loads(row["detail"]) for row in aside if row["sample_id"] == "dead"]
    assert detail == {"shard": "dead", "error": "RuntimeError: the engine core is dead"}
    assert capfd.readouterr().err.count("an engine ended") == 4


def test_where_every_chunk_ends_its_engines_the_harvest_stops(crew):
    def behave(names, calls):
        if names != ["open"]:
            raise RuntimeError("the engine core is dead")

    said = r"3 shards in a row ended 2 engines each, the last one by RuntimeError: the engine core"
    with pytest.raises(ValueError, match=said):
        list(crew(behave, ["a"] * 9)[0])


def test_an_engine_that_does_not_start_says_why_as_the_user_needs_it(crew):
    def behave(names, calls):
        raise ValueError("no model in there: set target.path")

    with pytest.raises(ValueError, match=r"no model in there: set target.path"):
        list(crew(behave, ["a"])[0])
