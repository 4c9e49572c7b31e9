"""What is damaged leaves the index, what is finished enters it, and nothing else is touched."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from store import shard_repair
from store.feature_index import index_of
from store.feature_shards import MARKS, write_shard
from store.features import features_row
from store.place import place_of
from store.schemas import FEATURE_INDEX, features_schema
from store.shard_repair import mend
from store.tables import Table
from tests.helpers.features import SCHEMA, SHAPE, cache_of, made, write


@pytest.fixture
def place(work_url):
    return place_of(work_url) / "key"


@pytest.fixture
def index(work_url):
    return Table(place_of(work_url) / "feature_index", FEATURE_INDEX)


@pytest.fixture
def looked(monkeypatch):
    """Names of the shards of which every byte is read."""
    names, real = [], shard_repair.find_faults
    monkeypatch.setattr(
        shard_repair, "find_faults", lambda p, name, f: (names.append(name), real(p, name, f))[1]
    )
    return names


def mended(place, index, check=lambda: None):
    found = mend(place, index.under(check), SCHEMA)
    return found, index_of(index, "key")["sample_id"].to_pylist()


def shard_of(rows):
    return rows["file"][0].as_py()


def test_a_sound_cache_costs_a_listing(place, index, looked):
    version = index.append(write(place, made("a", "b")))
    assert mended(place, index) == (shard_repair.Mended(), ["a", "b"])
    assert (looked, index.version()) == ([], version)


def test_finished_shards_are_adopted_by_sample(place, index, looked):
    """Also if chunks were cut elsewhere than before."""
    listed = write(place, made("a", "b", "c"))
    index.append(listed)
    again, overlap = write(place, made("a", "b")), write(place, made("c", "d"))
    bad = made("e", "f")
    bad["e"][0, 0] = float("inf")
    some = write(place, bad)
    place.write("half.parquet", place.read(shard_of(listed))[:300])
    other = features_schema("other", *SHAPE[1:])
    write_shard(place, other, [features_row("g", [1], made("g", tokens=1)["g"])])
    found, names = mended(place, index)
    assert (names, found.adopted) == (["a", "b", "c", "d", "f"], 2)
    assert sorted(looked) == sorted([shard_of(overlap), shard_of(some)])
    assert place.has(shard_of(again)), "gc deletes, not harvest"
    files = {row["sample_id"]: row["file"] for row in index_of(index, "key").to_pylist()}
    assert files["c"] == shard_of(listed)
    version = index.version()
    assert mended(place, index)[1] == names
    assert index.version() == version


def test_damaged_rows_leave_and_sound_ones_stay(place, index):
    samples = made("a", "b", "c")
    rows, other = write(place, samples), write(place, made("d"))
    index.append(pa.concat_tables([rows, other]))
    table = pq.read_table(place.open(shard_of(rows))).to_pylist()
    table[1]["hi"] = bytes([table[1]["hi"][0] ^ 1]) + table[1]["hi"][1:]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(table, schema=SCHEMA), sink)
    place.write(shard_of(rows), bytes(sink.getvalue()))
    found, names = mended(place, index)
    assert (list(found.damaged), found.lost, names) == (["b"], [], ["a", "c", "d"])
    cache = cache_of(place, index_of(index, "key"))
    assert all((cache[name] == samples[name]).all() for name in "ac")
    assert mended(place, index) == (shard_repair.Mended(), ["a", "c", "d"]), "not looked at again"


@pytest.mark.parametrize("how", ["deleted", "cut", "empty", "of another cache"])
def test_a_lost_shard_leaves(place, index, how):
    rows = write(place, made("a", "b"))
    index.append(pa.concat_tables([rows, write(place, made("c"))]))
    name = shard_of(rows)
    if how == "deleted":
        place.delete([name])
    elif how == "of another cache":
        other = features_schema("other", *SHAPE[1:])
        row = features_row("a", [1], made("a", tokens=1)["a"])
        place.write(name, place.read(shard_of(write_shard(place, other, [row]))))
    else:
        place.write(name, b"" if how == "empty" else place.read(name)[:200])
    found, names = mended(place, index)
    assert (found.lost, found.damaged, names) == ([name], {}, ["c"])


def test_a_mark_makes_a_shard_be_looked_at_once(place, index, looked):
    """A flipped bit changes neither size nor e_tag of an object."""
    rows = write(place, made("a", "b"))
    version = index.append(rows)
    place.write(f"{MARKS}/{shard_of(rows)}", b"")
    place.write(f"{MARKS}/long-gone.parquet", b"")
    assert mended(place, index)[1] == ["a", "b"]
    assert looked == [shard_of(rows)]
    assert list(place.objects(MARKS)) == []
    mended(place, index)
    assert len(looked) == 1
    assert index.version() <= version + 1


def test_a_copied_folder_is_looked_at_once(tmp_path, looked):
    """Its files have other e_tags."""
    place, index = (
        place_of(str(tmp_path / "key")),
        Table(place_of(str(tmp_path / "i")), FEATURE_INDEX),
    )
    rows = write(place, made("a", "b"))
    index.append(rows)
    data = place.read(shard_of(rows))
    place.delete([shard_of(rows)])
    place.write(shard_of(rows), data)
    for _ in range(2):
        assert mended(place, index) == (shard_repair.Mended(), ["a", "b"])
    assert looked == [shard_of(rows)]


def test_who_lost_the_lease_changes_nothing(place, index):
    rows = write(place, made("a"))
    index.append(rows)
    place.write(shard_of(rows), b"")
    place.write(f"{MARKS}/{shard_of(rows)}", b"")

    def check():
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        mended(place, index, check)
    assert index_of(index, "key").num_rows == 1
    assert len(list(place.objects(MARKS))) == 1
