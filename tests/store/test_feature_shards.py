"""Shards of features: named after their bytes, never changed, checked on every byte."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from store import feature_shards
from store.feature_shards import find_faults, listed, open_shard, read_group, write_shard
from store.features import features_row
from store.place import place_of
from store.schemas import FEATURE_INDEX, features_schema
from tests.helpers.features import SCHEMA, made, write


@pytest.fixture
def place(work_url):
    return place_of(work_url) / "features" / "key"


def test_a_shard_is_listed_as_it_is(place):
    index = write(place, made("a", "b"))
    [shard] = place.objects()
    assert index.schema == FEATURE_INDEX
    for row, name in zip(index.to_pylist(), "ab", strict=True):
        assert (row["features_key"], row["sample_id"], row["n_tokens"]) == ("key", name, 7)
        assert (row["file"], row["file_bytes"]) == (shard.name, shard.size)
        assert row["e_tag"] == shard.e_tag != ""
    footer = open_shard(place, shard.name, SCHEMA)
    assert listed(place, shard.name, footer) == [("a", 7, 0), ("b", 7, 0)]
    assert find_faults(place, shard.name, footer) == {}


def test_nothing_is_written_for_no_samples(place):
    assert write_shard(place, SCHEMA, iter(())).num_rows == 0
    assert list(place.objects()) == []


def test_row_groups_are_bounded_and_have_a_sample_at_least(place, monkeypatch):
    """Whoever wants one sample reads its row group."""
    monkeypatch.setattr(feature_shards, "ROW_GROUP_BYTES", 1000)  # a sample has 448, c has 1280
    index = write(place, made("a", "b") | made("c", tokens=20) | made("d"))
    assert index["row_group"].to_pylist() == [0, 0, 1, 2]


def test_a_late_writer_changes_nothing(place):
    """A harvest that was frozen, and goes on when another has published, has nothing to overwrite
    with: other numbers have another name, the same numbers are there already.
    """
    first = write(place, samples := made("a", "b"))
    [before] = place.objects()
    assert write(place, samples).drop("harvested_at") == first.drop("harvested_at")
    write(place, samples | {"b": samples["b"] * 1.01})
    after = {item.name: item for item in place.objects()}
    assert len(after) == 2
    assert after[before.name] == before


def test_a_damaged_object_is_written_again_under_its_name(place):
    index = write(place, samples := made("a"))
    name = index["file"][0].as_py()
    data = place.read(name)
    place.write(name, b"damaged")
    assert write(place, samples)["file_bytes"][0].as_py() == len(data)
    assert place.read(name) == data


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (("other", [1, 5], 16), "target_id"),
        (("t", [2, 6], 16), "target_layer_ids"),
        (("t", [1, 5], 8), "hidden_size"),
        (("t", [1, 5], 16, "bfloat16", 3), "top_k is 'missing', expected '3'"),
    ],
)
def test_a_shard_of_another_cache_is_refused(tmp_path, asked, named):
    place = place_of(str(tmp_path))
    name = write(place, made("a"))["file"][0].as_py()
    with pytest.raises(ValueError, match=f"{named}.*harvest again"):
        open_shard(place, name, features_schema(*asked))


def damage(place, change):
    """A shard of a and b whose bytes were made by `change` of its rows."""
    rows = [features_row(name, [1, 2, 3], torch.randn(3, 32).bfloat16()) for name in "ab"]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(change(*rows), schema=SCHEMA), sink)
    place.write("bad.parquet", bytes(sink.getvalue()))
    return open_shard(place, "bad.parquet", SCHEMA)


DAMAGE = {
    "a NaN": lambda a, b: a | {"hi": b"\x7f" + a["hi"][1:], "lo": b"\xc0" + a["lo"][1:]},
    "another's bytes": lambda a, b: a | {"hi": b["hi"], "lo": b["lo"]},
    "another's bytes and digest": lambda a, b: b | {"sample_id": a["sample_id"]},
    "a digest of what it never was": lambda a, b: a | {"digest": bytes(8)},
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_rows_are_found_and_no_others(tmp_path, name):
    """NaN in three samples once gave an interval of tau that began below zero. And training once
    took exchanged features without an error.
    """
    place = place_of(str(tmp_path))
    footer = damage(place, lambda a, b: [DAMAGE[name](a, b), b])
    faults = find_faults(place, "bad.parquet", footer)
    assert faults == {"a": "their bytes are not those that were written for this sample"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_features_that_were_written_as_nan_or_infinity_are_found(tmp_path, value):
    place, samples = place_of(str(tmp_path)), made("a", "b")
    samples["a"][1, 2] = value
    name = write(place, samples)["file"][0].as_py()
    assert find_faults(place, name, open_shard(place, name, SCHEMA)) == {"a": "they are not finite"}


def test_the_largest_numbers_are_finite(tmp_path):
    place, most = place_of(str(tmp_path)), torch.finfo(torch.bfloat16).max
    samples = {"a": torch.full((3, 32), most, dtype=torch.bfloat16)}
    name = write(place, samples)["file"][0].as_py()
    assert find_faults(place, name, open_shard(place, name, SCHEMA)) == {}


def test_a_store_that_fails_for_a_moment_is_not_damage(place, monkeypatch):
    index = write(place, made("a"))
    name, tries = index["file"][0].as_py(), []
    footer, real = open_shard(place, name, SCHEMA), feature_shards.Place.open

    def failing(self, name):
        tries.append(name)
        if len(tries) == 1:
            raise OSError("Generic S3 error: 503 Service Unavailable")
        return real(self, name)

    monkeypatch.setattr(feature_shards.Place, "open", failing)
    assert read_group(place, name, footer, 0, ["sample_id"])["sample_id"].to_pylist() == ["a"]
    assert len(tries) == 2


def test_a_refusing_store_is_named_as_such(s3_env, bucket, monkeypatch):
    """Computing the features again would not help."""
    place = place_of(bucket)
    name = write(place, made("a"))["file"][0].as_py()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    other = place_of(f"{bucket}/")
    from store import arrow_files
    from store import place as places

    places._store.cache_clear()
    arrow_files.files_of.cache_clear()
    with pytest.raises(PermissionError, match="check the permissions"):
        open_shard(other, name, SCHEMA)
    places._store.cache_clear()
    arrow_files.files_of.cache_clear()
