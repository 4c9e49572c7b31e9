"""Which weights are kept while training, and how its batches are read ahead."""

import itertools
import threading
import time

import pytest
from mlflow.utils.validation import _validate_metric_name

from jobs.base.config import load
from jobs.training.feed import prefetched
from jobs.training.validation import Choice, Taus
from store import feature_cache, feature_shards
from store.place import place_of
from tests.helpers.features import cache_of, made, write

BASE = Taus(2.0, {"general": 3.0, "tickets": 1.8})


def taus(general, tickets, pooled=2.0):
    return Taus(pooled, {"general": general, "tickets": tickets})


def test_the_adapted_domain_decides_unless_another_pays_too_much():
    choice = Choice(base=BASE.domains)
    assert choice.offer(0, BASE, "tickets", 0.01)
    assert not choice.offer(10, taus(2.9, 2.5), "tickets", 0.01), "general lost 3 %"
    assert choice.losers(taus(2.9, 2.5), 0.01) == ["general"]
    assert choice.offer(20, taus(2.98, 2.2), "tickets", 0.01), "general lost 0.7 %"
    assert not choice.offer(30, taus(4.0, 2.1, pooled=9.0), "tickets", 0.01), "tickets are worse"
    assert (choice.tau, choice.step, choice.stale) == (2.2, 20, 1)
    assert Choice(**choice.state()) == choice


def test_without_a_domain_the_pooled_tau_decides_and_one_allows_any_loss():
    choice = Choice(base=BASE.domains)
    assert choice.offer(1, taus(0.5, 1.0, pooled=2.5), "", 1.0)
    assert not choice.offer(2, taus(9.0, 9.0, pooled=2.5), "", 1.0), "no better than the best"


def test_a_new_drafter_has_no_base_to_lose_against():
    assert Choice().offer(5, taus(1.0, 1.1), "tickets", 0.0)


def test_domains_that_metrics_cannot_carry_are_renamed():
    from jobs.tracking.mlflow_runs import metric_name

    domains = ["a b", "a?", "a!", "team//x", "../b", ".", "/", "é" * 300, "x" * 300, "a/b"]
    names = list(map(metric_name, Taus(1.0, dict.fromkeys(domains, 2.0)).metrics()))
    assert names[:2] == ["val_tau", "val_tau/a b"]
    assert len(set(names)) == len(domains) + 1
    for name in names:
        _validate_metric_name(name)


def test_a_mix_needs_a_domain():
    with pytest.raises(ValueError, match=r"needs train\.domain"):
        load(None, ["train.mix=0.2"])
    with pytest.raises(ValueError, match="below 1"):
        load(None, ["train.mix=1.0", "train.domain=a"])


def test_prefetch_works_ahead_keeps_order_and_raises_in_place():
    made = []

    def make(step):
        if step == 3:
            raise OSError("shard 3 is gone")
        made.append(step)
        return step * 10

    values = prefetched(make, range(4))
    assert [next(values) for _ in range(3)] == [0, 10, 20]
    with pytest.raises(OSError, match="shard 3"):
        next(values)
    assert made == [0, 1, 2]
    ahead = prefetched(make, range(2))
    assert next(ahead) == 0
    ahead.close()  # waits for the thread
    assert made[3:] == [0, 1], "step 1 was on its way while step 0 was in use"


def test_features_of_the_next_step_are_read_while_this_one_is_computed(work_url, monkeypatch):
    """By all readers at a time: each waits here until three others have begun, too."""
    monkeypatch.setattr(feature_shards, "ROW_GROUP_BYTES", 1)
    place, steps = place_of(work_url) / "key", [[f"{s}{i}" for i in range(4)] for s in "abc"]
    index, read = write(place, made(*itertools.chain(*steps))), []
    together, real = threading.Barrier(4, timeout=60), feature_cache.read_group

    def slow(*args):
        together.wait()
        read.append(args)
        return real(*args)

    monkeypatch.setattr(feature_cache, "read_group", slow)
    cache = cache_of(place, index, readers=4)

    def make(step):
        cache.prefetch(steps[step])
        return [cache[name] for name in steps[step]]

    for step, batch in enumerate(prefetched(make, range(3)), 1):
        deadline = time.monotonic() + 60
        while len(read) < 4 * min(step + 1, 3):
            assert time.monotonic() < deadline, "the next step is not read meanwhile"
            time.sleep(0.01)
        assert len(batch) == 4
    assert len(read) == 12, "each row group once"
