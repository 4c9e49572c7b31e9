"""Put what was read from logs into the tables rejects, traffic, texts, acceptance and logs.

The order makes every interruption good with the same command: `logs` comes last. Until then the
markers are there, and the states that are replaced are known.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from jobs.base.config import Config
from jobs.ingestion.log_tasks import Read
from store.lease import Lease
from store.log_states import LogState, States, to_rows
from store.log_to_traffic import READING
from store.place import Place
from store.table_shards import Shard, file_has
from store.tables import Table

TRASH = "replaced"
"""Folder of the markers with the names of shards that are to be deleted."""


@dataclass(frozen=True)
class Publisher:
    """What is needed to commit under the lease `held`; `states` as before the run."""

    cfg: Config
    held: Lease
    states: States

    def table(self, name: str) -> Table:
        """A table that is only changed while the lease is held."""
        return self.cfg.table(name).under(self.held.check)

    def rejects(self, reads: Sequence[Read]) -> None:
        """Publish rejects in place of those from when a log was shorter, under other rules or for
        another target.

        The replaced shards are deleted at once, because former rules may have kept what must not be
        kept. So older versions of rejects/ cannot be read any more, on purpose.
        """
        new = [read for read in reads if not read.done]
        stale = [*_stale(new), *(state for read in new for state in read.of_others)]
        shards = [shard for read in new for shard in read.state.rejects or []]
        unpublished = [s.name for state in stale for s in state.rejects or []]
        self._replace(self.table("rejects"), new, stale, shards, stale, unpublished)

    def traffic(self, reads: Sequence[Read], any_accepted: bool) -> int:
        """Publish samples, and what was accepted of their drafts, in place of those from when a log
        was shorter or under other rules; returns the number of logs that are new. Samples of
        another target stay.

        If nothing was accepted at all, only samples of the same target are taken back that were
        accepted under other rules: for instance answers of another model, before ingest.models
        named the right one.

        Replaced shards of an older READING are deleted at once, because that version may have kept
        what must not be kept. So versions of traffic/ with these cannot be read any more, on
        purpose. Others stay until `flywheel gc`, because someone may be reading them.
        """
        new = [r for r in reads if not r.done and (any_accepted or self._takes_back(r))]
        stale = _stale(new)
        old = [state for state in stale if state.reading != READING]
        for name in ("traffic", "texts", "acceptance"):
            shards = [shard for read in new for shard in getattr(read.state, name) or []]
            if name != "traffic" and not shards and self.table(name).version() is None:
                continue  # no command has made this table, and there is nothing to tell
            unpublished = [s.name for state in old for s in getattr(state, name) or []]
            self._replace(self.table(name), new, stale, shards, old, unpublished)
        self._log(new, stale)
        return len(new)

    def _takes_back(self, read: Read) -> bool:
        return any(s.target_id == read.state.target_id for s in read.stale)

    def _log(self, new: Sequence[Read], stale: Sequence[LogState]) -> None:
        """Write the rows of logs/, then delete the markers."""
        if new:
            logs = self.table("logs")
            rows = logs.write(to_rows([read.state for read in new], datetime.now(UTC)))
            logs.replace("log", _keys(new, stale), [rows])
        over = {state.log for state in stale} | self.states.published.keys()
        marked = self.states.marked.keys() | self.states.broken.keys()
        keys = {read.state.log for read in new} | (over & marked)
        self.cfg.place("ingesting").delete([f"{key}.json" for key in keys])

    def _replace(
        self,
        table: Table,
        new: Sequence[Read],
        stale: Sequence[LogState],
        shards: Sequence[Shard],
        delete: Sequence[LogState],
        unpublished: Sequence[str],
    ) -> None:
        """One commit: `shards` in place of all rows of the states `new` and `stale`. What is no
        longer live of the states `delete` is deleted, also if this process dies in between.
        """
        if not new:
            return
        self._drop_lost(table, _keys(new, []))
        trash, name = self.cfg.place("ingesting", TRASH), f"{table.place.name}.json"
        keys = [state.log for state in delete]
        doomed = {s.name for s in table.shards().values() if s.may_have("log", keys)}
        doomed |= {*unpublished, *_names(trash, name), *_former(table, keys)}
        if doomed:
            trash.write(name, json.dumps(sorted(doomed)).encode())
        table.replace("log", _keys(new, stale), shards)
        self.held.check()
        table.place.delete(doomed - table.shards().keys())
        trash.delete([name] if doomed else [])

    def _drop_lost(self, table: Table, keys: Sequence[str]) -> None:
        """Take shards out of the table that are still lost: they had rows of other logs too.

        Those logs leave `logs` first, so they are read again wherever they are ingested.
        """
        lost = [s for s in table.lost() if s.may_have("log", keys)] if self.states.lost else []
        if lost:
            others = [k for k in self.states.published if any(s.may_have("log", [k]) for s in lost)]
            self.table("logs").replace("log", others, [])
            table.change(lambda live: ([], [s.name for s in lost if s.name in live]))


def _former(table: Table, keys: Sequence[str]) -> list[str]:
    """Files of the folder that are not live, and have rows of these logs: shards of versions
    from before a compaction, say.
    """
    if not keys:
        return []
    live = table.shards()
    names = [found.name for found in table.place.objects() if "/" not in found.name]
    return [name for name in names if name not in live and file_has(table.place, name, "log", keys)]


def _stale(reads: Sequence[Read]) -> list[LogState]:
    """The states that these replace."""
    return [*{state.log: state for read in reads for state in read.stale}.values()]


def _keys(new: Sequence[Read], stale: Sequence[LogState]) -> list[str]:
    return [*(read.state.log for read in new), *(state.log for state in stale)]


def _names(trash: Place, name: str) -> list[str]:
    with suppress(ValueError, TypeError):
        return [*map(str, json.loads(trash.read(name) or b"[]"))]
    return []
