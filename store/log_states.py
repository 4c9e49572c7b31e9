"""States of logs: one content of a log, read under one set of rules.

    logs/                     table: the states whose samples are in traffic/, one row each
    ingesting/<key>.json      marker: a state that was read, but is not in logs/ yet

A marker names the shards that were written. So a run that was killed or refused does not have to
read these logs again, and the next one knows which rows belong to a log that has changed meanwhile.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa

from store.place import Place
from store.schemas import ACCEPTANCE, LOGS, REJECTS, TEXTS, TIMESTAMP, TRAFFIC
from store.table_shards import Shard
from store.tables import Table


@dataclass(frozen=True, slots=True)
class LogState:
    """One content of a log under one set of rules. The fields are columns of LOGS.

    `traffic`, `rejects`, `acceptance` and `texts`: the shards of a marker. They are None for a row
    of LOGS: the tables have these rows.
    """

    log: str
    path: str
    target_id: str
    bytes: int
    sha256: str
    rules: str
    reading: int
    counts: Mapping[str, int]
    names: Mapping[str, int]
    examples: Mapping[str, str]
    traffic: list[Shard] | None = None
    rejects: list[Shard] | None = None
    acceptance: list[Shard] | None = None
    texts: list[Shard] | None = None


PARSED = ("counts", "names", "examples")
"""Fields that are JSON in LOGS."""
COLUMNS = [name for name in LOGS.names if name != "ingested_at"]
SHARDED = {"traffic": TRAFFIC, "rejects": REJECTS, "acceptance": ACCEPTANCE, "texts": TEXTS}
"""Tables with rows of logs; in each, the column `log` has the key of their state. A marker of an
older release names no acceptance or texts."""


@dataclass(frozen=True, slots=True)
class States:
    """The states that are known at the start of a run, by key."""

    published: dict[str, LogState]
    marked: dict[str, LogState]
    broken: dict[str, LogState]
    """States of markers that lack a shard: to be read again, but traffic/ may have their rows."""
    lost: list[Shard]  # of all tables that have rows of logs
    by_content: dict[tuple[int, str], list[LogState]] = field(default_factory=dict)

    @classmethod
    def read(cls, logs: Table, markers: Place, tables: Sequence[Table]) -> "States":
        """Read all of them. A marker spares a reading if all its shards are whole."""
        rows = logs.read(COLUMNS).to_pylist()
        published = {row["log"]: _of_row(row) for row in rows}
        lost = [shard for table in tables for shard in table.lost()]
        found = cls(published, *_marked(markers, tables), lost)
        for state in (found.published | found.marked | found.broken).values():
            if state.bytes:  # every log begins with an empty one
                found.by_content.setdefault((state.bytes, state.sha256), []).append(state)
        return found

    def of_content(self, prefixes: Mapping[int, str]) -> list[LogState]:
        """States of a log now, when it was shorter or under other rules.

        prefixes: {n: sha256 of the log's first n bytes}.
        """
        return [state for p in prefixes.items() for state in self.by_content.get(p, [])]

    def is_whole(self, key: str) -> bool:
        """Whether this state is published and no shard is lost that may have rows of it."""
        lost = any(shard.may_have("log", [key]) for shard in self.lost)
        return key in self.published and not lost


def _of_row(row: dict[str, Any]) -> LogState:
    return LogState(**row | {name: json.loads(row[name]) for name in PARSED})


def to_rows(states: Iterable[LogState], now: datetime) -> pa.Table:
    """States as rows of LOGS."""
    rows = [
        {name: getattr(state, name) for name in COLUMNS}
        | {name: json.dumps(dict(getattr(state, name))) for name in PARSED}
        | {"ingested_at": now}
        for state in states
    ]
    return pa.Table.from_pylist(rows, schema=LOGS)


def mark(markers: Place, state: LogState) -> LogState:
    """Write a marker, unless somebody did; returns the state of the one that is there."""
    data = json.dumps(asdict(state), default=datetime.isoformat).encode()
    name = f"{state.log}.json"
    if markers.create(name, data):
        return state
    return _of_marker(markers.read(name)) or state


def _marked(
    markers: Place, tables: Sequence[Table]
) -> tuple[dict[str, LogState], dict[str, LogState]]:
    """The states of markers by key: those whose shards are all there, and the others."""
    names = [found.name for found in markers.objects() if "/" not in found.name]
    if not names:
        return {}, {}
    there = {(found.name, found.size) for table in tables for found in table.place.objects()}
    marked, broken = {}, {}
    for name in names:
        state = _of_marker(markers.read(name))
        if state is None:
            markers.delete([name])
            continue
        whole = {(s.name, s.bytes) for s in shards_of(state)} <= there
        (marked if whole else broken)[state.log] = state
    return marked, broken


def shards_of(state: LogState) -> list[Shard]:
    """The shards that a marker names."""
    return [
        *(state.traffic or []),
        *(state.rejects or []),
        *(state.acceptance or []),
        *(state.texts or []),
    ]


def _of_marker(data: bytes | None) -> LogState | None:
    """The state of a marker; None if it is gone or not in the form that is written here."""
    try:
        value = json.loads(data or b"")
        shards = {
            name: [_shard(shard, schema) for shard in value.get(name, [])]
            for name, schema in SHARDED.items()
        }
        return LogState(**value | shards)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _shard(value: dict[str, Any], schema: pa.Schema) -> Shard:
    times = {item.name for item in schema if item.type == TIMESTAMP}
    low, high = (
        {k: datetime.fromisoformat(v) if k in times else v for k, v in value[side].items()}
        for side in ("low", "high")
    )
    return Shard(value["name"], value["bytes"], value["rows"], low, high, value["nulls"])
