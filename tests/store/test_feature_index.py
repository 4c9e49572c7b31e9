"""The list of what is in the feature cache."""

import pyarrow as pa
import pytest

from store.feature_index import check_all_harvested, index_of
from store.place import place_of
from store.schemas import FEATURE_INDEX
from store.tables import Table
from tests.helpers.features import made, write


@pytest.fixture
def table(work_url):
    return Table(place_of(work_url) / "feature_index", FEATURE_INDEX)


def test_samples_are_found_by_cache_and_name_the_first_harvested(table, tmp_path):
    key, other = (place_of(str(tmp_path / name)) for name in ("key", "other"))
    first, again = write(key, made("b", "a")), write(key, made("c", "b"))
    for rows in (again, write(other, made("a", "d")), first):
        version = table.append(rows)
    found = index_of(table, "key")
    assert found.column_names == ["sample_id", "n_tokens", "file", "row_group"]
    assert found["sample_id"].to_pylist() == ["a", "b", "c"]
    files = [rows["file"][0].as_py() for rows in (first, first, again)]
    assert found["file"].to_pylist() == files
    assert index_of(table, "key", ["b", "d"])["sample_id"].to_pylist() == ["b"]
    assert index_of(table, "key", pa.array(["b"]))["sample_id"].to_pylist() == ["b"]
    assert index_of(table, "key", [])["sample_id"].to_pylist() == []
    assert index_of(table, "none")["sample_id"].to_pylist() == []
    assert index_of(table, "key", version=version - 1)["sample_id"].to_pylist() == ["b", "c"]


def test_missing_samples_are_named():
    check_all_harvested(["a", "b"], {"a"})
    with pytest.raises(ValueError, match=r"2 of 3 samples have no features \(for instance y\)"):
        check_all_harvested(["a"], ["a", "z", "y"])
