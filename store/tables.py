"""Narrow tables in Delta Lake format: Parquet shards, and a log of numbered commits.

    <table>/<sha256 of its bytes>.parquet    a shard, named after its content
    <table>/_delta_log/<version>.json        what commit `version` added and removed

A shard is written first and published by a commit, which is one conditional put. Readers follow the
log, so they see whole commits only. A commit names the version that it was computed from: if
another writer was first, it is computed again from the newer version (`Table.change`). So changes
are as if made one after the other, whoever makes them. Old versions stay readable until
`flywheel gc` (jobs/gc.py).

Any reader of Delta Lake can read these tables (docs/how-to/read-the-tables.md).
"""

import json
import os
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from store.place import Place, first_line, plain_fault
from store.table_shards import Shard, added, live_shards, removed, write_shard

TRIES = 60
"""Most attempts of one change. Each is lost only to a change of another writer."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table at a place. `schema`: its columns; older shards may lack the later ones (null).

    check: is called right before each commit, and raises if this process may not commit any more.
    """

    place: Place
    schema: pa.Schema
    check: Callable[[], None] | None = None

    def under(self, check: Callable[[], None]) -> "Table":
        """The same table for whoever commits only while `check` does not raise (Lease.check)."""
        return replace(self, check=check)

    def version(self) -> int | None:
        """The number of its latest commit; None if nothing was ever written."""
        found = self.delta()
        return None if found is None else found.version()

    def shards(self, version: int | None = None) -> dict[str, Shard]:
        """The shards of a version (default: the latest) by name."""
        found = self.delta(version)
        return {} if found is None else live_shards(found)

    def note(self, version: int) -> dict[str, Any]:
        """What was noted with the commit of this version; {} for other commits."""
        # Not DeltaTable.history: that of an older version begins with the latest commit (1.6.6).
        log = self.place.read(f"_delta_log/{version:020}.json") or b""
        infos = [json.loads(line).get("commitInfo", {}) for line in log.splitlines()]
        return json.loads(next((info[NOTE] for info in infos if NOTE in info), "{}"))

    def write(self, rows: pa.Table) -> Shard:
        """Write rows as a shard that no version has yet; `change` publishes it."""
        return write_shard(self.place, rows.select(self.schema.names).cast(self.schema))

    def append(self, rows: pa.Table, note: dict[str, Any] | None = None) -> int:
        """Add rows; returns the version that has them."""
        shard = self.write(rows)
        return self.change(lambda live: ([shard], []), note)

    def replace(
        self,
        column: str,
        values: Collection[Any],
        shards: Sequence[Shard],
        note: dict[str, Any] | None = None,
        expect: int | None = None,
    ) -> int:
        """Put `shards` in place of all rows whose `column` has one of `values`, in one commit.

        Returns the version. If exactly these shards have these rows already, nothing is written.
        `expect` is as in `change`.
        """

        def change(live: dict[str, Shard]) -> tuple[list[Shard], list[str]]:
            new = {shard.name: shard for shard in shards}
            old = [s for s in live.values() if s.may_have(column, values) and s.name not in new]
            whole = [s for s in old if s.has_only(column, values)]
            rest, touched = self._without(column, values, [s for s in old if s not in whole])
            gone = [s.name for s in whole] + touched
            return [s for s in [*new.values(), *rest] if s.name not in live], gone

        return self.change(change, note, expect)

    def change(
        self,
        change: Callable[[dict[str, Shard]], tuple[Sequence[Shard], Sequence[str]]],
        note: dict[str, Any] | None = None,
        expect: int | None = None,
        empty: bool = False,
    ) -> int:
        """Commit what `change` makes of the live shards: (shards to add, names to remove).

        If another writer commits first, `change` is called again with what is live then. If it
        changes nothing, nothing is written, unless `empty` asks for a commit that only notes
        something. Returns the version that is as wanted.

        expect: the only version that may be changed; Conflict is raised if there is a later one.
        """
        for attempt in range(TRIES):
            table = self._opened()
            before = table.version()
            if expect is not None and before != expect:
                raise Conflict(f"{self.place} has version {before}, not {expect}")
            live = live_shards(table)
            add, remove = change(live)
            if not (add or remove or empty):
                return before
            actions = [added(shard) for shard in add]
            actions += [removed(live[name]) for name in remove]
            if self.check is not None:
                self.check()
            if self._commit(table, actions, note or {}):
                return before + 1
            if expect is not None:
                raise Conflict(f"{self.place}: another writer committed version {expect + 1}")
            time.sleep(random.uniform(0, min(2.0, 0.02 * 2**attempt)))
        raise OSError(f"{self.place}: {TRIES} commits were lost to other writers; run again")

    def dataset(
        self, version: int | None = None, names: Collection[str] | None = None
    ) -> ds.Dataset:
        """The rows of a version (default: the latest), or of its shards `names`, to scan by column
        and filter, not loaded.
        """
        found = self.delta(version)
        if found is None:
            return ds.dataset(self.schema.empty_table())
        # Not DeltaTable.to_pyarrow_dataset (1.6.6): it reads through Python, so a scan that ends
        # early can abort the interpreter at exit; and it leaves out shards that lack a statistic.
        files, folder = self.place.files()
        form = ds.ParquetFileFormat()
        fragments = [
            form.make_fragment(f"{folder}/{shard.name}", files, shard.bounds(self.schema))
            for shard in live_shards(found).values()
            if names is None or shard.name in names
        ]
        return ds.FileSystemDataset(fragments, self.schema, form, files)

    def batches(
        self,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
        version: int | None = None,
        names: Collection[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Rows of a version in batches, in the order of the shards' names; the memory that this
        needs does not grow with the table.
        """
        dataset = self.dataset(version, names)
        kept = list(self.schema.names if columns is None else columns)
        with told(self.place):
            yield from dataset.scanner(
                columns=kept, filter=where, batch_readahead=2, fragment_readahead=1
            ).to_batches()

    def read(
        self,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
        version: int | None = None,
        names: Collection[str] | None = None,
    ) -> pa.Table:
        """Rows of a version, or of its shards `names`, as one Arrow table; for what is bounded."""
        kept = list(self.schema.names if columns is None else columns)
        schema = pa.schema([self.schema.field(name) for name in kept])
        return pa.Table.from_batches(self.batches(kept, where, version, names), schema)

    def lost(self) -> list[Shard]:
        """Live shards whose object is gone or has another size. Costs a listing."""
        live = self.shards()  # before the listing: what is committed later may not be in that
        found = {item.name: item.size for item in self.place.objects() if "/" not in item.name}
        suspect = [shard for shard in live.values() if found.get(shard.name) != shard.bytes]
        still = self.shards() if suspect else {}
        return [shard for shard in suspect if shard.name in still]

    def _without(
        self, column: str, values: Collection[Any], shards: list[Shard]
    ) -> tuple[list[Shard], list[str]]:
        """(shards with the other rows, names of the shards that had these rows)."""
        rest, touched = [], []
        for shard in shards:
            with told(self.place, shard.name):
                file = pq.ParquetFile(self.place.open(shard.name))
                if column not in file.schema_arrow.names:
                    continue  # written before this column was known
                rows = file.read()
            theirs = pa.array(values, rows.schema.field(column).type)
            kept = rows.filter(~pc.field(column).isin(theirs))
            if len(kept) < len(rows):
                touched.append(shard.name)
                rest += [write_shard(self.place, kept)] if len(kept) else []
        return rest, touched

    def _commit(self, table: DeltaTable, actions: list[Any], note: dict[str, Any]) -> bool:
        """Commit as the next version; False if another writer has committed that."""
        mine, number = {"commit": os.urandom(8).hex()} | note, table.version() + 1
        try:
            with told(self.place):
                table.create_write_transaction(
                    actions,
                    "append",
                    self.schema,
                    commit_properties=CommitProperties(
                        custom_metadata={NOTE: json.dumps(mine)}, max_commit_retries=0
                    ),
                )
        except (CommitFailedError, OSError) as error:
            # The answer of the store may have been lost, after it had committed.
            if self.note(number).get("commit") == mine["commit"]:
                return True
            if isinstance(error, OSError):
                raise
            return False
        # The library does not: after a power cut, an empty commit would be read as one of nothing.
        self.place.sync(f"_delta_log/{number:020}.json")
        return True

    def _options(self) -> dict[str, str] | None:
        return None if self.place.is_local else OPTIONS

    def delta(self, version: int | None = None) -> DeltaTable | None:
        """A version as Delta Lake's own library has it; None if nothing was ever written."""
        try:
            with told(self.place):
                return DeltaTable(str(self.place), version=version, storage_options=self._options())
        except TableNotFoundError:
            return None

    def _opened(self) -> DeltaTable:
        """The table, created if it is new, with all columns of the schema."""
        table = self.delta()
        if table is None:
            if self.place.is_local:
                self.place.path.mkdir(parents=True, exist_ok=True)
            with told(self.place), suppress(CommitFailedError):  # another writer was first
                DeltaTable.create(
                    str(self.place),
                    self.schema,
                    mode="ignore",
                    configuration=KEEP,
                    storage_options=self._options(),
                )
            table = self.delta()
            assert table is not None
        known = {field.name for field in table.schema().fields}
        if new := [f for f in _delta_fields(self.schema) if f.name not in known]:
            with told(self.place), suppress(CommitFailedError):
                table.alter.add_columns(new)
            return self._opened()
        return table


KEPT_DAYS = 90
OPTIONS = {
    "max_retries": "1000",
    "retry_timeout": "60s",
    "backoff_config.max_backoff": "2s",
    "connect_timeout": "5s",
    "allow_http": "true",
}
"""Of the object store under a table in a bucket; as in store/place.py."""
KEEP = {
    "delta.logRetentionDuration": "interval 3650 days",
    "delta.deletedFileRetentionDuration": f"interval {KEPT_DAYS} days",
    "delta.dataSkippingNumIndexedCols": "-1",  # statistics of every column, as we write them
}
"""Old versions end with `flywheel gc`, not by themselves. A log tells for KEPT_DAYS when a file was
removed from its table."""
NOTE = "flywheel"


class Conflict(OSError):
    """Another writer has committed since the version that a change was computed from."""


def _delta_fields(schema: pa.Schema) -> list[Any]:
    from deltalake import Schema

    return Schema.from_arrow(schema).fields


@contextmanager
def told(place: Place, name: str = "") -> Iterator[None]:
    """Errors of Delta Lake and Arrow as OSErrors that name the table and say what to do."""
    where = f"{place}/{name}" if name else str(place)
    try:
        yield
    except (CommitFailedError, TableNotFoundError):
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{where}: a file of this version is gone ({first_line(error)}): an old version that "
            "`flywheel gc` has collected, or a file deleted by hand (`flywheel ingest` or "
            "`flywheel harvest` make theirs anew)"
        ) from error
    except (DeltaError, OSError, pa.ArrowInvalid) as error:
        text = first_line(error)
        if fault := plain_fault(error, where):
            raise fault from error
        raise OSError(
            f"{where}: cannot be read or written ({text}); run again, and if that does not help, "
            "restore this folder from a backup"
        ) from error
