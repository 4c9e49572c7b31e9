"""Which samples have features, and where: the table feature_index, a row per sample and cache."""

from collections.abc import Collection

import pyarrow as pa
import pyarrow.compute as pc

from store.tables import Table


def index_of(
    table: Table,
    key: str,
    names: "Collection[str] | pa.Array | None" = None,
    version: int | None = None,
) -> pa.Table:
    """(sample_id, n_tokens, file, row_group) of the samples `names` (None: all) that have features
    under a cache key, sorted by sample_id. Where several shards have a sample, the first harvested.
    """
    where = pc.field("features_key") == key
    if names is not None:
        wanted = names if isinstance(names, pa.Array) else pa.array(list(names), pa.string())
        where &= pc.field("sample_id").isin(wanted)
    columns = ["sample_id", "n_tokens", "file", "row_group"]
    rows = table.read([*columns, "harvested_at"], where, version)
    order = [(name, "ascending") for name in ("sample_id", "harvested_at", "file")]
    rows = rows.sort_by(order).select(columns).combine_chunks()
    if len(rows) < 2:
        return rows
    ids = rows["sample_id"]
    new = pc.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1))  # pyright: ignore[reportAttributeAccessIssue]
    return rows.filter(pa.chunked_array([pa.array([True]), *new.chunks]))


def check_all_harvested(found: Collection[str], wanted: Collection[str]) -> None:
    """Raise ValueError naming one of the wanted samples that have no features."""
    known = found if isinstance(found, set | dict) else set(found)
    missing = [name for name in wanted if name not in known]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(wanted)} samples have no features (for instance "
            f"{min(missing)}): run `flywheel harvest`"
        )
