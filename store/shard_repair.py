"""Repair of the feature cache: damaged rows leave the index, finished shards enter it.

An interrupted harvest leaves shards that nothing lists. The next harvest adopts them. Checking
every byte of a cache costs as much as reading it. So a shard is checked again only if it is marked
by a reader, or its size or e_tag is not the listed one. One listing of the folder tells.
"""

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


def mend(place: Place, index: Table, schema: pa.Schema) -> Mended:
    """Take damaged rows out of the table feature_index, and list finished shards.

    place: features/<cache key>. schema: of this cache (store.schemas.features_schema). Shards are
    never deleted here: `flywheel gc` does that.
    """
    found, objects = Mended(), list(place.objects())
    shards = {o.name: o for o in objects if o.name.endswith(".parquet") and "/" not in o.name}
    marks = [o.name for o in objects if o.name.startswith(f"{MARKS}/")]
    listed_as = _listed_files(index, place.name)
    suspect = {name.rpartition("/")[2] for name in marks} & listed_as.keys()
    for name, stamp in listed_as.items():
        if name not in shards or stamp != (shards[name].size, shards[name].e_tag):
            suspect.add(name)
    if suspect:
        rows = _intact(place, index, schema, {name: shards.get(name) for name in suspect}, found)
        new = [index.write(rows)] if len(rows) else []
        index.replace("file", suspect, new)
    place.delete(marks)
    unlisted = [shard for name, shard in shards.items() if name not in listed_as]
    fresh = _leftovers(place, index, schema, unlisted) if unlisted else []
    if any(map(len, fresh)):
        index.append(pa.concat_tables(fresh))
        found.adopted = sum(map(len, fresh))
    return found


def _listed_files(index: Table, key: str) -> dict[str, tuple[int, str]]:
    """Bytes and e_tag of every shard that the index names."""
    columns = ["file", "file_bytes", "e_tag"]
    rows = index.read(columns, pc.field("features_key") == key).group_by(columns).aggregate([])
    return {row["file"]: (row["file_bytes"], row["e_tag"]) for row in rows.to_pylist()}


def _intact(
    place: Place, index: Table, schema: pa.Schema, shards: dict[str, Found | None], found: Mended
) -> pa.Table:
    """The rows of the index for shards that may be damaged or gone, without the damaged ones."""
    where = (pc.field("features_key") == place.name) & pc.field("file").isin(list(shards))
    before, kept = index.read(["sample_id", "file"], where), [FEATURE_INDEX.empty_table()]
    for name, shard in sorted(shards.items()):
        try:
            rows, faults = _checked(place, schema, shard) if shard else (None, {})
        except ValueError:
            rows, faults = None, {}
        if rows is None:
            found.lost.append(name)
            continue
        known = before.filter(pc.field("file") == name)["sample_id"].combine_chunks()
        kept.append(rows.filter(pc.field("sample_id").isin(known)))
        known = set(known.to_pylist())
        found.damaged |= {sample: fault for sample, fault in faults.items() if sample in known}
    return pa.concat_tables(kept)


def _leftovers(
    place: Place, index: Table, schema: pa.Schema, shards: list[Found]
) -> list[pa.Table]:
    """Index rows of undamaged samples of shards that nothing lists, which no listed shard has."""
    fresh, known = [], index_of(index, place.name)["sample_id"].combine_chunks()
    for shard in shards:
        try:
            samples = listed(place, shard.name, open_shard(place, shard.name, schema))
            new = pa.table({"sample_id": pa.array([s[0] for s in samples], pa.string())})
            if not len(new.filter(~pc.field("sample_id").isin(known))):
                continue  # computed again by a harvest that was overtaken
            rows, _ = _checked(place, schema, shard)
        except ValueError:
            continue  # of another cache, or damaged: not read; harvest computes its samples
        fresh.append(rows.filter(~pc.field("sample_id").isin(known)))
        known = pa.concat_arrays([known, fresh[-1]["sample_id"].combine_chunks()])
    return fresh


def _checked(place: Place, schema: pa.Schema, shard: Found) -> tuple[pa.Table, dict[str, str]]:
    """(index rows of the undamaged samples of a shard, what is wrong with the others). Reads every
    byte. Raises ValueError if it cannot be read.
    """
    footer = open_shard(place, shard.name, schema)
    faults = find_faults(place, shard.name, footer)
    sound = [sample for sample in listed(place, shard.name, footer) if sample[0] not in faults]
    return index_rows(place.name, shard, sound, shard.modified), faults
