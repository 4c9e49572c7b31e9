"""Compaction of narrow tables, and the files of a table that no version needs any more."""

from collections.abc import Collection

from deltalake import DeltaTable, WriterProperties
from deltalake.exceptions import CommitFailedError

from store.place import Found
from store.table_shards import Shard
from store.tables import Table, told

TARGET = 64 << 20
"""Bytes of a shard after compaction: to read one from a bucket takes about a second."""
SMALL = TARGET // 4
FEW = 16
"""Small shards that a table may have: together they cost a reader less than a second."""
GROUP = 16 << 20
"""Bytes of a row group after compaction: who reads one row reads its group."""
TRIES = 3


def small_shards(table: Table) -> list[Shard]:
    """The shards that compaction would put together; empty if they are too few to be worth it."""
    small = [shard for shard in table.shards().values() if shard.bytes < SMALL]
    return small if len(small) > FEW else []


def compact(table: Table) -> bool:
    """Write the rows of small shards into shards of about TARGET bytes, in one commit. The rows are
    the same, and old versions stay readable.

    Returns False if each attempt was lost to a writer that removed some of these shards meanwhile.
    """
    shards = table.shards().values()
    per_group = GROUP * sum(s.rows for s in shards) // sum(s.bytes for s in shards)
    properties = WriterProperties(
        compression="ZSTD", compression_level=1, max_row_group_size=max(1, per_group)
    )
    for _ in range(TRIES):
        try:
            with told(table.place):
                DeltaTable(str(table.place)).optimize.compact(
                    target_size=TARGET, max_concurrent_tasks=1, writer_properties=properties
                )
            return True
        except CommitFailedError:
            continue
    return False


def unneeded(table: Table, days: float, keep: Collection[int] = ()) -> list[Found]:
    """Files of a table's folder that the latest version does not need, nor one of `keep`.

    They left the table more than `days` ago, or they never were in it and were written before that.
    Files and folders whose name begins with "_" or "." are not looked at.
    """
    latest = table.version()
    if latest is None:
        return []
    with told(table.place):
        names = DeltaTable(str(table.place)).vacuum(
            retention_hours=round(24 * days),
            dry_run=True,
            enforce_retention_duration=False,
            full=True,
            keep_versions=[version for version in sorted(keep) if version <= latest] or None,
        )
    wanted = set(names)
    return [found for found in table.place.objects() if found.name in wanted]
