"""What the actors of a harvest ask Ray for."""

import pyarrow as pa
import pytest
import torch

from jobs.harvesting import actors
from jobs.harvesting.harvester import Harvested
from store.place import place_of
from tests.helpers.work import configure


def nodes(*cpus, gpus=0):
    return [{"Alive": True, "Resources": {"CPU": float(n), "GPU": float(gpus)}} for n in cpus]


def test_actors_ask_for_what_ray_has(tmp_path, monkeypatch):
    """In a container with a CPU limit each actor once asked for more CPUs than Ray had, and waited
    for ever.
    """
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    cfg = configure(tmp_path, "harvest.workers=2")
    assert actors.actor_share(cfg, nodes(5)) == {"num_cpus": 2, "num_gpus": 0}
    assert actors.actor_share(cfg, nodes(4, 4)) == {"num_cpus": 4, "num_gpus": 0}
    assert actors.actor_share(cfg, nodes(2, gpus=2)) == {"num_cpus": 1, "num_gpus": 1}
    one = configure(tmp_path)
    assert actors.actor_share(one, nodes(1))["num_cpus"] == 1
    assert actors.actor_share(one, nodes(3, 5))["num_cpus"] == 5, "an actor lives on one node"
    with pytest.raises(ValueError, match=r"harvest\.workers=2, but Ray has 1 CPUs"):
        actors.actor_share(cfg, nodes(1))
    with pytest.raises(ValueError, match=r"harvest\.workers=2, but Ray has 1 GPUs"):
        actors.actor_share(cfg, nodes(4, gpus=1))
    assert actors.actor_share(configure(tmp_path, "target.device=cpu"), nodes(4, gpus=1)) == {
        "num_cpus": 4,
        "num_gpus": 0,
    }


def test_a_head_node_without_gpus_does_not_make_harvest_wait_for_ever(tmp_path):
    """Actors once asked for 32 CPUs and a GPU each, but the node with the GPUs has 8 CPUs."""
    cfg = configure(tmp_path, "harvest.workers=2", "ray.address=auto")
    head = nodes(64)
    assert actors.actor_share(cfg, [*head, *nodes(8, gpus=2)]) == {"num_cpus": 4, "num_gpus": 1}
    with pytest.raises(ValueError, match=r"workers=2.*2 GPUs are on nodes with too few CPUs"):
        actors.actor_share(cfg, [*head, *nodes(1, gpus=2)])


def test_chunks_wait_until_an_actor_has_room(ray_cluster, tmp_path, monkeypatch):
    """The driver once put the tokens of all samples into Ray at the start."""

    class Worker:
        def __init__(self, cfg, threads):
            pass

        def shard(self, place, chunk):
            return Harvested(chunk, [{"place": str(place)}])

    monkeypatch.setattr(actors, "Harvester", Worker)
    cfg, taken, place = configure(tmp_path, "harvest.workers=2"), [], place_of(str(tmp_path))

    def chunks():
        for i in range(20):
            taken.append(i)
            yield pa.table({"n": [i]})

    ahead, found = [], []
    for done in actors.by_actors(cfg, place, chunks(), 20):
        found += done.index["n"].to_pylist()
        ahead.append(len(taken) - len(found))
        assert done.aside == [{"place": str(tmp_path)}]
    assert sorted(found) == list(range(20)), "each once"
    assert max(ahead) == 2 * actors.WAITING
