"""Repair of the feature cache: damaged rows leave the index, finished shards enter it.

An interrupted harvest leaves shards that nothing lists. The next harvest adopts them. Checking every
byte of a cache costs as much as reading it. So a shard is checked again only if it is marked by a
reader, or its size or e_tag is not the listed one. One listing of the folder tells.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from store.feature_index import index_of
from store.feature_shards import MARKS, find_faults, index_rows, listed, open_shard
from store.place import Found, Place
from store.schemas import FEATURE_INDEX
from store.tables import Table


@dataclass
class Mended:
    """What was repaired.

    damaged: sample id -> what was wrong. lost: shards that were gone or could not be read. adopted:
    number of samples of finished shards that are listed now.
    """

    damaged: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    adopted: int = 0


def mend(place: Place, index: Table, schema: pa.Schema, check: Callable[[], None]) -> Mended:
    """Take damaged rows out of the table feature_index, and list finished shards.

    place: features/<cache key>. schema: of this cache (store.schemas.features_schema). check: called
    right before each commit; it raises if this process may not commit any more. Objects are never
    deleted here: `flywheel gc` does that.
    """
    found = Mended()
    objects = list(place.objects())
    shards = {item.name: item for item in objects if item.name.endswith(".parquet") and "/" not in item.name}
    marks = [item.name for item in objects if item.name.startswith(f"{MARKS}/")]
    known = _listed_files(index, place.name)
    marked = {name.rpartition("/")[2] for name in marks}
    suspect = sorted(
        name
        for name, stamp in known.items()
        if name in marked or name not in shards or stamp != (shards[name].size, shards[name].e_tag)
    )
    if suspect:
        kept = [_intact(place, index, schema, name, shards.get(name), found) for name in suspect]
        rows = pa.concat_tables(kept)
        new = [index.write(rows)] if len(rows) else []
        check()
        index.replace("file", suspect, new)
    place.delete(marks)
    fresh = _leftovers(place, index, schema, [shards[n] for n in shards if n not in known])
    if len(fresh):
        check()
        index.append(fresh)
        found.adopted = len(fresh)
    return found


def _listed_files(index: Table, key: str) -> dict[str, tuple[int, str]]:
    """Bytes and e_tag of every shard that the index names."""
    columns = ["file", "file_bytes", "e_tag"]
    rows = index.read(columns, pc.field("features_key") == key).group_by(columns).aggregate([])
    return {row["file"]: (row["file_bytes"], row["e_tag"]) for row in rows.to_pylist()}


def _intact(
    place: Place, index: Table, schema: pa.Schema, name: str, shard: Found | None, found: Mended
) -> pa.Table:
    """The rows of the index for a shard that may be damaged, without the damaged ones."""
    ours = pc.field("features_key") == place.name
    before = index.read(["sample_id"], ours & (pc.field("file") == name))["sample_id"]
    try:
        if shard is None:
            raise ValueError(f"{place}/{name} is gone")
        rows, faults = _checked(place, schema, shard)
    except ValueError:
        found.lost.append(name)
        return FEATURE_INDEX.empty_table()
    ours = pc.field("sample_id").isin(before.combine_chunks())
    found.damaged |= {s: fault for s, fault in faults.items() if s in set(before.to_pylist())}
    return rows.filter(ours)


def _leftovers(place: Place, index: Table, schema: pa.Schema, shards: list[Found]) -> pa.Table:
    """Index rows of undamaged samples of shards that nothing lists, which no listed shard has."""
    fresh = FEATURE_INDEX.empty_table()
    if not shards:
        return fresh
    have = index_of(index, place.name)["sample_id"]
    for shard in shards:
        try:
            names = [name for name, *_ in listed(place, shard.name, open_shard(place, shard.name, schema))]
            new = pa.array(names, pa.string())
            new = new.filter(pc.invert(pc.is_in(new, have.combine_chunks())))
            if not len(new):
                continue
            rows, _ = _checked(place, schema, shard)
        except ValueError:
            continue  # of another cache, or damaged: not read; harvest computes its samples
        rows = rows.filter(pc.field("sample_id").isin(new))
        fresh = pa.concat_tables([fresh, rows])
        have = pa.chunked_array([*have.chunks, *rows["sample_id"].chunks], pa.string())
    return fresh


def _checked(place: Place, schema: pa.Schema, shard: Found) -> tuple[pa.Table, dict[str, str]]:
    """(index rows of the undamaged samples of a shard, what is wrong with the others). Reads every
    byte. Raises ValueError if it cannot be read.
    """
    footer = open_shard(place, shard.name, schema)
    faults = find_faults(place, shard.name, footer)
    sound = [sample for sample in listed(place, shard.name, footer) if sample[0] not in faults]
    return index_rows(place.name, shard, sound, shard.modified), faults
