"""Features through Parquet: as they were, and refused when made for something else."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from store.feature_codec import decode
from store.features import (
    FeatureCache,
    cache_key,
    features_row,
    ids_digest,
    read_shard,
    read_top,
    top_row,
)
from store.schemas import features_schema
from store.shards import write_shard


def write(path, schema, x):
    rows = [features_row(name, range(len(x)), x) for name in ("s", "t")]
    write_shard(path, pa.Table.from_pylist(rows, schema=schema))


def test_shard_round_trip(tmp_path):
    x = torch.randn(7, 2 * 16).to(torch.bfloat16)
    write(tmp_path / "f.parquet", features_schema("t", [1, 5], 16), x)
    rows = list(read_shard(tmp_path / "f.parquet", "t", [1, 5], 16))
    assert [name for name, _ in rows] == ["s", "t"]
    assert torch.equal(rows[1][1], x)


DAMAGE = {
    "a NaN": (lambda a, b: a | {"hi": b"\x7f" + a["hi"][1:], "lo": b"\xc0" + a["lo"][1:]}, "bytes"),
    "another's bytes": (lambda a, b: a | {"hi": b["hi"], "lo": b["lo"]}, "bytes"),
    "another's bytes and digest": (lambda a, b: b | {"sample_id": a["sample_id"]}, "bytes"),
    "a digest of what it never was": (lambda a, b: a | {"digest": bytes(8)}, "bytes"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_features_that_are_not_what_was_written_are_refused_by_name(tmp_path, name):
    """NaN in three samples once gave an interval of tau that began below zero. And training once
    took exchanged features without an error.
    """
    change, said = DAMAGE[name]
    first, second = (features_row(n, [1, 2, 3], torch.randn(3, 32).bfloat16()) for n in "ab")
    rows = [change(first, second), second]
    path = tmp_path / "f.parquet"
    write_shard(path, pa.Table.from_pylist(rows, schema=features_schema("t", [1, 5], 16)))
    before = path.stat().st_mtime_ns
    with pytest.raises(ValueError, match=rf"f\.parquet.*sample a.*{said}.*flywheel harvest"):
        list(read_shard(path, "t", [1, 5], 16))
    assert path.stat().st_mtime_ns != before, "so that harvest looks at it"
    with pytest.raises(ValueError, match="sample a"):
        FeatureCache([path], "t", [1, 5], 16, {"a"}, 0)["a"]
    [(_, found)] = read_shard(path, "t", [1, 5], 16, {"b"})
    assert torch.equal(found, decode(second["hi"], second["lo"], 3)), "the other one is as it was"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_features_that_were_written_as_nan_or_infinity_are_refused(tmp_path, value):
    x = torch.randn(3, 32).bfloat16()
    x[1, 2] = value
    write(tmp_path / "f.parquet", features_schema("t", [1, 5], 16), x)
    with pytest.raises(ValueError, match=r"sample s.*not finite"):
        next(read_shard(tmp_path / "f.parquet", "t", [1, 5], 16))


def test_the_largest_numbers_are_finite(tmp_path):
    x = torch.full((3, 32), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    write(tmp_path / "f.parquet", features_schema("t", [1, 5], 16), x)
    assert torch.equal(next(read_shard(tmp_path / "f.parquet", "t", [1, 5], 16))[1], x)


def test_features_of_other_token_ids_are_refused(tmp_path):
    path = tmp_path / "f.parquet"
    write(path, features_schema("t", [1, 5], 16), torch.randn(3, 32).bfloat16())
    assert next(read_shard(path, "t", [1, 5], 16, {"s": ids_digest([0, 1, 2])}))[0] == "s"
    with pytest.raises(ValueError, match=r"sample s.*other token ids"):
        next(read_shard(path, "t", [1, 5], 16, {"s": ids_digest([0, 1, 3])}))
    with pytest.raises(ValueError, match=r"sample s.*other token ids"):
        FeatureCache([path], "t", [1, 5], 16, {"s": ids_digest([0, 1, 3])}, 0)["s"]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "f.parquet"
    write(path, features_schema("t", [1, 5], 16), torch.randn(64, 32).bfloat16())
    data = bytearray(path.read_bytes())
    data[200:260] = bytes(60)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"f\.parquet.*flywheel harvest"):
        list(read_shard(path, "t", [1, 5], 16))
    path.write_bytes(data[:100])
    with pytest.raises(ValueError, match=r"f\.parquet: cannot be read.*flywheel harvest"):
        list(read_shard(path, "t", [1, 5], 16))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (("other", [1, 5], 16), "target_id"),
        (("t", [2, 6], 16), "target_layer_ids"),
        (("t", [1, 5], 8), "hidden_size"),
    ],
)
def test_shard_made_for_something_else_is_refused(tmp_path, asked, named):
    write(tmp_path / "f.parquet", features_schema("t", [1, 5], 16), torch.ones(2, 32).bfloat16())
    with pytest.raises(ValueError, match=named):
        next(read_shard(tmp_path / "f.parquet", *asked))


@pytest.fixture
def shards(tmp_path):
    """Two shards, each with two samples in row groups of their own: 4 x 7 tokens of 64 bytes."""
    schema = features_schema("t", [1, 5], 16)
    known = {}
    for name in "ab":
        rows = []
        for i in range(2):
            known[f"{name}{i}"] = torch.randn(7, 32).bfloat16()
            rows.append(features_row(f"{name}{i}", range(7), known[f"{name}{i}"]))
        table = pa.Table.from_pylist(rows, schema=schema)
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=1)
    return sorted(tmp_path.iterdir()), known


def test_cache_gives_every_sample_whatever_its_budget(shards):
    paths, known = shards
    for budget in (0, 2 * 448, 1 << 20):
        cache = FeatureCache(paths, "t", [1, 5], 16, known.keys(), budget)
        for name in ("a0", "b1", "a0", "a1", "b0", "b1"):
            assert torch.equal(cache[name], known[name])
            assert cache.size == sum(
                t.nbytes for group in cache.kept.values() for t in group.values()
            )
            assert cache.size <= max(budget, 448), "one sample at least, never more than allowed"
    assert len(cache.kept) == 4, "what fits is read once"


def test_cache_keeps_the_start_of_each_sample(shards):
    paths, known = shards
    for length in (1, 6, 7, 8):
        cache = FeatureCache(paths, "t", [1, 5], 16, known.keys(), 1 << 20, length)
        for name, features in known.items():
            assert torch.equal(cache[name], features[:length])
        held = sum(t.untyped_storage().nbytes() for g in cache.kept.values() for t in g.values())
        assert held == cache.size == 4 * 64 * min(length, 7), "what is cut off is not held"


def test_cache_names_missing_samples_and_refuses_other_features(shards):
    paths, known = shards
    with pytest.raises(ValueError, match=r"1 of 5 samples have no features \(for instance z\)"):
        FeatureCache(paths, "t", [1, 5], 16, {*known, "z"}, 0)
    with pytest.raises(ValueError, match="target_id"):
        FeatureCache(paths, "other", [1, 5], 16, known.keys(), 0)
    only = FeatureCache(paths, "t", [1, 5], 16, {"b1"}, 1 << 20)
    assert torch.equal(only["b1"], known["b1"])
    with pytest.raises(KeyError):
        only["b0"]


def test_a_shard_that_was_taken_away_meanwhile_is_named(shards):
    """It was once a FileNotFoundError without an explanation."""
    paths, known = shards
    cache = FeatureCache(paths, "t", [1, 5], 16, known.keys(), 0)
    for path in paths:
        path.unlink()
    with pytest.raises(ValueError, match=r"cannot be read .*flywheel harvest"):
        cache["a0"]


def test_cache_key_depends_on_each_part():
    keys = {cache_key("t", [1, 2], "bfloat16"), cache_key("u", [1, 2], "bfloat16")}
    keys |= {cache_key("t", [1, 3], "bfloat16"), cache_key("t", [1, 2], "float32")}
    keys |= {cache_key("t", [1, 2], "bfloat16", 8), cache_key("t", [1, 2], "bfloat16", 16)}
    assert len(keys) == 6
    assert cache_key("t", [1, 2], "bfloat16") == cache_key("t", [1, 2], "bfloat16")


def test_log_probabilities_round_trip_beside_the_features(tmp_path):
    """Two answers of different length; features read as before, float16 values bit for bit."""
    schema, path = features_schema("t", [1, 5], 16, top_k=3), tmp_path / "f.parquet"
    x, rows = torch.ones(4, 32).bfloat16(), []
    for n in (4, 2):
        row = features_row(f"s{n}", range(4), x)
        rows.append(row | top_row(row, np.arange(n * 3), -np.sqrt(np.arange(n * 3))))
    write_shard(path, pa.Table.from_pylist(rows, schema=schema))
    assert [torch.equal(f, x) for _, f in read_shard(path, "t", [1, 5], 16)] == [True, True]
    (first, ids, _), (second, _, logprobs) = read_top(path, "t", [1, 5], 16, 3)
    assert (first, second, ids.shape) == ("s4", "s2", (4, 3))
    assert ids.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert torch.equal(logprobs, -torch.arange(6).sqrt().half().view(2, 3))
    swapped = [row | {"top_ids": rows[0]["top_ids"]} for row in rows]
    write_shard(path, pa.Table.from_pylist(swapped, schema=schema))
    with pytest.raises(ValueError, match=r"sample s2.*log-probabilities"):
        list(read_top(path, "t", [1, 5], 16, 3))


def test_log_probabilities_that_a_shard_lacks_are_missed(tmp_path):
    write(tmp_path / "f.parquet", features_schema("t", [1, 5], 16), torch.ones(2, 32).bfloat16())
    with pytest.raises(ValueError, match="top_k is 'missing', expected '3'; harvest again"):
        next(read_top(tmp_path / "f.parquet", "t", [1, 5], 16, 3))
