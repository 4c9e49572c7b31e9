"""Features by sample id: what was written for the sample, or an error that names it."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from store import feature_cache, feature_shards
from store.feature_cache import read_top
from store.feature_shards import MARKS, write_shard
from store.features import features_row, ids_digest, top_row
from store.place import place_of
from store.schemas import features_schema
from tests.helpers.features import SCHEMA, SHAPE, cache_of, made, write

SAMPLE = 7 * 32 * 2
"""Bytes of a sample."""


@pytest.fixture
def place(work_url):
    return place_of(work_url) / "key"


def marks(place):
    return [item.name for item in place.objects(MARKS)]


@pytest.fixture
def shards(place, monkeypatch):
    """Two shards, each with two samples in row groups of their own."""
    monkeypatch.setattr(feature_shards, "ROW_GROUP_BYTES", 1)
    known = [made("a0", "a1"), made("b0", "b1")]
    index = pa.concat_tables([write(place, samples) for samples in known])
    return place, index, known[0] | known[1]


def test_every_sample_is_given_whatever_the_budget(shards):
    place, index, known = shards
    for budget in (0, 2 * SAMPLE, 1 << 20):
        cache = cache_of(place, index, budget=budget)
        for name in ("a0", "b1", "a0", "a1", "b0", "b1"):
            assert torch.equal(cache[name], known[name])
            assert cache.size == sum(t.nbytes for g in cache.kept.values() for t in g.values())
            assert cache.size <= max(budget, SAMPLE), "one at least, never more than allowed"
    assert len(cache.kept) == 4, "what fits is read once"


def test_what_was_read_ahead_is_not_read_again(shards, monkeypatch):
    place, index, known = shards
    read, real = [], feature_cache.read_group
    monkeypatch.setattr(feature_cache, "read_group", lambda *a: (read.append(a), real(*a))[1])
    cache = cache_of(place, index, readers=3)
    for _ in range(2):
        cache.prefetch(known)
        assert all(torch.equal(cache[name], known[name]) for name in known)
    assert len(read) == 2 * 4 - 1, "what is in memory and named again stays there"
    assert len(cache.kept) == 1, "what was asked for is subject to the budget again"


def test_samples_of_one_row_group_are_read_together_in_any_order(place, monkeypatch):
    """A step that takes a0, b0, a1 read the row group of a0 and a1 twice without a budget."""
    index = pa.concat_tables([write(place, made("a0", "a1")), write(place, made("b0"))])
    read, real = [], feature_cache.read_group
    monkeypatch.setattr(feature_cache, "read_group", lambda *a: (read.append(a), real(*a))[1])
    cache = cache_of(place, index)
    cache.prefetch(step := ["a0", "b0", "a1", "a0"])
    for name in step:
        cache[name]
    assert len(read) == 2


def test_the_start_of_each_sample_is_kept(shards):
    place, index, known = shards
    for length in (1, 6, 7, 8):
        cache = cache_of(place, index, budget=1 << 20, max_length=length)
        for name, features in known.items():
            assert torch.equal(cache[name], features[:length])
        held = sum(t.untyped_storage().nbytes() for g in cache.kept.values() for t in g.values())
        assert held == cache.size == 4 * 64 * min(length, 7), "what is cut off is not held"


def test_a_sample_without_features_is_named(shards):
    place, index, _ = shards
    with pytest.raises(ValueError, match=r"no features \(for instance z\): run `flywheel harvest`"):
        cache_of(place, index)["z"]
    with pytest.raises(ValueError, match="no features"):
        cache_of(place, index.slice(0, 0))["a0"]


def test_only_listed_rows_are_read(place):
    """The others of a row group may be damaged, or computed again elsewhere."""
    bad = made("a", "b")
    bad["a"][0, 0] = float("nan")
    index = write(place, bad).slice(1)
    cache = cache_of(place, index, budget=1 << 20)
    assert torch.equal(cache["b"], bad["b"])
    assert cache.size == SAMPLE
    assert marks(place) == []


def replaced(place, index, change):
    """Write other rows under the name of the shard of `index`."""
    rows = [features_row(name, range(7), x) for name, x in made("a", "b").items()]
    change(*rows)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), sink)
    place.write(index["file"][0].as_py(), bytes(sink.getvalue()))


def test_damage_is_named_and_marked_for_harvest(place):
    index = write(place, made("a", "b"))
    replaced(place, index, lambda a, b: a.update(hi=b["hi"]))
    name = index["file"][0].as_py()
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{name}.*sample a .*bytes.*flywheel harvest"):
            cache_of(place, index)["a"]
    assert marks(place) == [f"{MARKS}/{name}"]


def test_a_row_that_is_not_where_it_is_listed_is_damage(place):
    index = write(place, made("a", "b"))
    replaced(
        place, index, lambda a, b: a.update(features_row("c", [1], torch.ones(1, 32).bfloat16()))
    )
    with pytest.raises(ValueError, match=r"sample a are damaged: they are not where"):
        cache_of(place, index)["a"]
    assert len(marks(place)) == 1


def test_features_of_other_token_ids_are_refused(place):
    index = write(place, known := made("a"))
    good, bad = (pa.array([ids_digest(ids)]) for ids in (range(7), range(1, 8)))
    assert torch.equal(cache_of(place, index, digests=good)["a"], known["a"])
    with pytest.raises(ValueError, match=r"sample a .*other token ids"):
        cache_of(place, index, digests=bad)["a"]


def test_a_shard_that_cannot_be_read_is_named(place):
    index = write(place, made("a", tokens=64))
    name = index["file"][0].as_py()
    data = bytearray(place.read(name))
    place.write(name, bytes(data[:100]))
    with pytest.raises(ValueError, match=rf"{name}: cannot be read.*flywheel harvest"):
        cache_of(place, index)["a"]
    assert marks(place) == [f"{MARKS}/{name}"]
    data[200:260] = bytes(60)
    place.write(name, bytes(data))
    with pytest.raises(ValueError, match=rf"{name}.*flywheel harvest"):
        cache_of(place, index)["a"]


def test_a_shard_that_was_taken_away_meanwhile_is_named(shards):
    """It was once a FileNotFoundError without an explanation."""
    place, index, _ = shards
    cache = cache_of(place, index)
    cache["a0"]
    place.delete(set(index["file"].to_pylist()))
    with pytest.raises(ValueError, match=r"cannot be read .*flywheel harvest"):
        cache["a1"]


def test_a_shard_of_another_target_is_refused(place):
    other = features_schema("other", *SHAPE[1:])
    index = write_shard(place, other, [features_row("a", [1], torch.ones(1, 32).bfloat16())])
    with pytest.raises(ValueError, match="target_id is 'other', expected 't'"):
        cache_of(place, index)["a"]
    assert marks(place) == [], "it is not damaged"


def test_log_probabilities_round_trip_beside_the_features(place, monkeypatch):
    """Two answers of different length; features read as before, float16 values bit for bit."""
    monkeypatch.setattr(feature_shards, "ROW_GROUP_BYTES", 1)
    schema, x, rows = features_schema(*SHAPE, top_k=3), torch.ones(4, 32).bfloat16(), []
    for n in (4, 2):
        row = features_row(f"s{n}", range(4), x)
        rows.append(row | top_row(row, np.arange(n * 3), -np.sqrt(np.arange(n * 3))))
    index = write_shard(place, schema, rows)
    assert torch.equal(cache_of(place, index)["s2"], x)
    (first, ids, _), (second, _, logprobs) = read_top(place, index, *SHAPE, 3)
    assert (first, second, ids.shape) == ("s4", "s2", (4, 3))
    assert ids.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert torch.equal(logprobs, -torch.arange(6).sqrt().half().view(2, 3))
    assert [name for name, *_ in read_top(place, index.slice(1), *SHAPE, 3)] == ["s2"]
    swapped = [row | {"top_ids": rows[0]["top_ids"]} for row in rows]
    bad = write_shard(place, schema, swapped)
    with pytest.raises(ValueError, match=r"sample s2.*log-probabilities"):
        list(read_top(place, bad, *SHAPE, 3))
    assert len(marks(place)) == 1


def test_log_probabilities_that_a_shard_lacks_are_missed(place):
    index = write(place, made("a"))
    with pytest.raises(ValueError, match="top_k is 'missing', expected '3'; harvest again"):
        next(read_top(place, index, *SHAPE, 3))
