"""What shards say about their columns: no reader may leave out a shard that has rows it wants."""

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from store.place import place_of
from store.tables import Table

SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("share", pa.float32()),
        ("flag", pa.bool_()),
        ("ids", pa.list_(pa.int32())),
        ("row", pa.int32()),
    ]
)
LONG = "y" * 63 + "\N{LATIN SMALL LETTER E WITH ACUTE}" * 40
HIGHEST = "\U0010ffff" * 70
PARTS = [["x"], ["x", LONG], ["x", None], [None, None], [LONG, LONG + "z"], ["x", HIGHEST], [""]]
WANTED = {
    "one": pc.field("name") == "x",
    "long": pc.field("name") == LONG,
    "highest": pc.field("name") == HIGHEST,
    "some": pc.field("name").isin(["x", LONG + "z"]),
    "others": pc.field("name") != "x",
    "not some": ~pc.field("name").isin(["x"]),
    "null": pc.field("name").is_null(),
    "valid": pc.field("name").is_valid(),
    "share": pc.field("share") == 0.5,
    "flag": pc.field("flag"),
}


def rows_of(number: int, names: list[str | None]) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {"name": name, "share": [0.5, None][i], "flag": bool(i), "ids": [i], "row": 10 * number}
            for i, name in enumerate(names)
        ],
        schema=SCHEMA,
    )


@pytest.fixture(params=["ours", "compacted", "both"])
def table(request, tmp_path) -> Table:
    """Shards of every kind: written here, by the library's compaction, or by both."""
    table = Table(place_of(str(tmp_path / "t")), SCHEMA)
    for turn in range(2):
        for number, names in enumerate(PARTS):
            table.append(rows_of(number + 10 * turn, names))
        if request.param == "compacted" or (request.param == "both" and not turn):
            DeltaTable(str(table.place)).optimize.compact()
    return table


@pytest.mark.parametrize("wanted", WANTED)
def test_a_filter_finds_what_it_would_find_without_statistics(table, wanted):
    numbered = [(n + 10 * turn, p) for turn in (0, 1) for n, p in enumerate(PARTS)]
    everything = pa.concat_tables(rows_of(n, names) for n, names in numbered)
    expected = sorted(everything.filter(WANTED[wanted])["row"].to_pylist())
    assert sorted(table.read(where=WANTED[wanted])["row"].to_pylist()) == expected
    library = DeltaTable(str(table.place)).to_pyarrow_dataset().to_table(filter=WANTED[wanted])
    assert sorted(library["row"].to_pylist()) == expected, "a reader without our code"


def test_replacing_leaves_rows_without_a_value(tmp_path):
    table = Table(place_of(str(tmp_path / "t")), SCHEMA)
    table.append(rows_of(0, ["x", None]))
    table.append(rows_of(1, [None, None]))
    table.append(rows_of(2, ["x", "x"]))
    table.replace("name", ["x"], [])
    assert table.read()["row"].to_pylist().count(0) == 1
    assert sorted(table.read()["row"].to_pylist()) == [0, 10, 10]


def test_bounds_of_cut_texts(tmp_path):
    table = Table(place_of(str(tmp_path / "t")), SCHEMA)
    shard = table.write(rows_of(0, [LONG, LONG]))
    assert len(shard.low["name"]) <= 64 < len(shard.high["name"]) + 1
    assert shard.may_have("name", [LONG])
    assert not shard.may_have("name", ["x"])
    assert not shard.has_only("name", [LONG]), "cut texts may differ behind the cut"
