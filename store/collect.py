"""Compaction of narrow tables, and the files of a table that no version needs any more."""

from collections.abc import Collection, Iterator
from contextlib import suppress

from store.place import Found
from store.table_shards import Shard
from store.tables import Conflict, Table, told

TARGET = 64 << 20
"""Bytes of a shard after compaction: to read one from a bucket takes about a second."""
SMALL = TARGET // 4
TRIES = 3
FEW = 16
"""Small shards that a table may have: together they cost a reader less than a second."""


def small_shards(live: Collection[Shard]) -> list[Shard]:
    """The shards that compaction would put together; empty if they are too few to be worth it."""
    small = [shard for shard in live if shard.bytes < SMALL]
    return small if len(small) > FEW else []


def compact(table: Table) -> bool:
    """Write the rows of small shards into shards of about TARGET bytes, in one commit. The rows are
    the same, and old versions stay readable. False if other writers took small shards away each
    time.

    Commits of others that leave these shards alone do not matter. The compaction of deltalake
    (1.6.6) is not safe: beside a removal, or another compaction, it brings rows back or doubles
    them (docs/decisions/037).
    """
    for _ in range(TRIES):
        groups = [*_groups(small_shards(table.shards().values()))]
        gone = [shard.name for group in groups for shard in group]
        made = [table.write(table.read(names={shard.name for shard in g})) for g in groups]

        def change(
            live: dict[str, Shard], made: list[Shard] = made, gone: list[str] = gone
        ) -> tuple[list[Shard], list[str]]:
            if not live.keys() >= {*gone}:
                raise Conflict(f"{table.place}: another writer took a small shard away")
            return [shard for shard in made if shard.name not in live], gone

        with suppress(Conflict):
            table.change(change, {"compacted": True})
            return True
    return False


def _groups(shards: list[Shard]) -> Iterator[list[Shard]]:
    """Shards whose bytes add up to about TARGET, those of like rows together."""
    group: list[Shard] = []
    for shard in sorted(shards, key=lambda shard: (str(sorted(shard.low.items())), shard.name)):
        if group and sum(one.bytes for one in group) + shard.bytes > TARGET:
            yield group
            group = []
        group.append(shard)
    if len(group) > 1:
        yield group


def unneeded(table: Table, days: float, keep: Collection[int] = ()) -> list[Found]:
    """Files of a table's folder that the latest version does not need, nor one of `keep`.

    They left the table more than `days` ago, or they never were in it and were written before that.
    Files and folders whose name begins with "_" or "." are not looked at.
    """
    found = table.delta()
    if found is None:
        return []
    latest = found.version()
    with told(table.place):
        names = found.vacuum(
            retention_hours=round(24 * days),
            dry_run=True,
            enforce_retention_duration=False,
            full=True,
            keep_versions=[version for version in sorted(keep) if version <= latest] or None,
        )
    wanted = set(names)
    return [one for one in table.place.objects() if one.name in wanted]
