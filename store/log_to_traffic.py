"""From one log to shards of traffic, acceptance and rejects, written but not published yet.

No Ray and no torch here, so a worker that runs `ingest_log` starts quickly.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from store.ids import short_hash
from store.log_files import on_disk, other_kind
from store.log_formats import NotUsed, Outcome, Reject, Rules, parse_log
from store.log_states import LogState, mark
from store.place import Place
from store.table_shards import Shard
from store.tables import Table

READING = 4
"""Version of the parsing. It goes up when the same bytes under the same rules give other rows; logs
are then read again."""
SHARD_TOKENS = 8_000_000  # about 32 MiB of ids
SHARD_ROWS = 100_000
PACKED = 1000
"""Rows that are Python objects at a time."""
MAX_REJECTS_BYTES = 4 << 20
"""Bytes of rejects kept of one log. Of rejects beyond that, only place and reason are kept."""
MAX_NAMES = 100  # names of one kind that are counted separately
MAX_NAME = 100  # characters


def key_of(sha256: str, rules: Rules) -> str:
    """The key of a log's state: of content, rules and version of the parsing."""
    return short_hash([READING, sha256, asdict(rules)])


def ingest_log(
    log: str,
    size: int,
    sha256: str,
    rules: Rules,
    traffic: Table,
    rejects: Table,
    acceptance: Table,
    markers: Place,
    copies: Path | None = None,
) -> LogState:
    """Parse one log into shards and write its marker (as a Ray task, it sends back nothing else).

    `size` and `sha256` as of `digest_log`, `copies` as in `on_disk`. Run again, it writes the same
    shards under the same names. Raises ValueError if the log has changed since its digest was made.
    """
    key = key_of(sha256, rules)
    tally = Tally(log)
    good, bad, rounds = (_Shards(table, key) for table in (traffic, rejects, acceptance))
    room = MAX_REJECTS_BYTES
    for outcome in _outcomes(log, size, sha256, rules, copies):
        tally.add(outcome)
        if isinstance(outcome, Reject):
            raw = outcome.raw if len(outcome.raw) <= room else b""
            room -= len(raw)
            row = {"file": log, "offset": outcome.offset}
            bad.add(row | {"reason": outcome.reason, "raw": raw}, 1)
        elif not isinstance(outcome, NotUsed):
            good.add(outcome, outcome["prompt_tokens"] + outcome["output_tokens"])
            if served := outcome["acceptance"]:
                rounds.add(served | {"batch": key}, len(served["accepted"]))
    state = LogState(
        log=key,
        path=log,
        target_id=rules.target_id,
        bytes=size,
        sha256=sha256,
        rules=json.dumps(asdict(rules), sort_keys=True),
        reading=READING,
        counts=dict(tally.counts),
        names=dict(tally.names),
        examples=tally.examples,
        traffic=good.close(),
        acceptance=rounds.close(),
        rejects=bad.close(),  # the last: if this run is killed before the marker, nobody knows it
    )
    return mark(markers, state)


def _outcomes(
    log: str, size: int, sha256: str, rules: Rules, copies: Path | None
) -> Iterator[Outcome]:
    """The outcome of every record, or one of the whole file if it holds no JSON lines."""
    with on_disk(log, copies) as path:
        kind = other_kind(path)
        if kind is not None:
            yield NotUsed(0, "text_log", f"{path.name} is {kind}")
        else:
            yield from parse_log(path, size, sha256, rules, log)


class Tally:
    """What became of the records of one log.

    counts: "records", "accepted", "finish:REASON", and by class "reject:REASON" and
    "unused:REASON". names: "model:NAME" of accepted records, "REASON:WHAT" of others.
    """

    def __init__(self, log: str):
        self.log = log
        self.counts: Counter[str] = Counter()
        self.names: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, outcome: Outcome) -> None:
        """Count one outcome, and remember where each reason was found first."""
        self.counts["records"] += 1
        if isinstance(outcome, Reject | NotUsed):
            kind = "reject" if isinstance(outcome, Reject) else "unused"
            self.counts[f"{kind}:{outcome.reason}"] += 1
            self.examples.setdefault(outcome.reason, f"{self.log}:{outcome.offset}")
            if outcome.detail:
                self._name(f"{outcome.reason}:{outcome.detail}")
        else:
            self.counts["accepted"] += 1
            self.counts[f"finish:{outcome['finish_reason']}"] += 1
            if outcome["model"] is not None:
                self._name(f"model:{outcome['model']}")

    def _name(self, name: str) -> None:
        name = name if len(name) <= MAX_NAME else name[:MAX_NAME] + "..."
        kind = name.partition(":")[0] + ":"
        if name not in self.names and sum(n.startswith(kind) for n in self.names) >= MAX_NAMES:
            name = kind + "(others)"
        self.names[name] += 1


class _Shards:
    """Rows in, shards out; of traffic, equal samples within a shard are one row with a count."""

    def __init__(self, table: Table, key: str):
        self.table, self.key = table, key
        self.merges = "prompt_ids" in table.schema.names
        self.rows: list[dict[str, Any]] = []
        self.packed: list[pa.Table] = []
        self.places: dict[Any, int] = {}  # of a sample among the rows of the shard
        self.repeats: list[int] = []
        self.size = 0
        self.shards: list[Shard] = []

    def add(self, row: dict[str, Any], size: int) -> None:
        # Under another label it is another row: store.traffic_table needs to see every label.
        name = (row["sample_id"], row["conversation_id"]) if self.merges else len(self.repeats)
        place = self.places.setdefault(name, len(self.repeats))
        if place < len(self.repeats):
            self.repeats[place] += 1
            return
        self.repeats.append(1)
        self.rows.append(row)
        self.size += size
        if len(self.rows) >= PACKED:
            self._pack()
        if self.size >= SHARD_TOKENS or len(self.repeats) >= SHARD_ROWS:
            self._write()

    def close(self) -> list[Shard]:
        if self.repeats:
            self._write()
        return self.shards

    def _pack(self) -> None:
        """Make Arrow of rows: as Python objects they need several times the memory."""
        rows = [row | {"log": self.key} for row in self.rows]
        self.packed.append(pa.Table.from_pylist(rows, schema=self.table.schema))
        self.rows = []

    def _write(self) -> None:
        self._pack()
        table = pa.concat_tables(self.packed)
        if self.merges:
            column = table.schema.get_field_index("repeat_count")
            counts = pa.array(self.repeats, pa.int32())
            table = table.set_column(column, table.schema.field(column), counts)
        self.packed, self.places, self.repeats, self.size = [], {}, [], 0
        self.shards.append(self.table.write(table))
