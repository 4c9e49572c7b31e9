"""From one log to shards of traffic, texts, acceptance and rejects, not published yet.

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
from store.log_formats import NotUsed, Outcome, Reject, Render, Rules, parse_log
from store.log_states import LogState, mark
from store.place import Place
from store.table_shards import Shard
from store.tables import Table
from store.text_rows import CHARACTERS

READING = 5
"""Version of the parsing. It goes up when the same bytes under the same rules give other rows; logs
are then read again."""
SHARD_TOKENS = 8_000_000  # about 32 MiB of ids
SHARD_ROWS = 100_000
PACKED, PACKED_TOKENS = 1000, 1_000_000
"""Rows, and tokens in them, that are Python objects at a time."""
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
    texts: Table,
    markers: Place,
    copies: Path | None = None,
    render: Render | None = None,
) -> LogState:
    """Parse one log into shards and write its marker (as a Ray task, it sends back nothing else).

    `size` and `sha256` as of `digest_log`, `copies` as in `on_disk`, `render` as in `parse_log`.
    Run again, it writes the same shards under the same names. Raises ValueError if the log has
    changed since its digest was made.
    """
    key = key_of(sha256, rules)
    tally = Tally(log)
    tables = traffic, rejects, acceptance, texts
    good, bad, rounds, said = (_Shards(table, key) for table in tables)
    room = MAX_REJECTS_BYTES
    for outcome in _outcomes(log, size, sha256, rules, copies, render):
        tally.add(outcome)
        if isinstance(outcome, Reject):
            raw = outcome.raw if len(outcome.raw) <= room else b""
            room -= len(raw)
            row = {"file": log, "offset": outcome.offset}
            bad.add(row | {"reason": outcome.reason, "raw": raw}, 1)
        elif isinstance(outcome, dict) and "text_id" in outcome:
            said.add(outcome, len(outcome["messages"]) // CHARACTERS)
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
        texts=said.close(),
        rejects=bad.close(),  # the last: if this run is killed before the marker, nobody knows it
    )
    return mark(markers, state)


def _outcomes(
    log: str, size: int, sha256: str, rules: Rules, copies: Path | None, render: Render | None
) -> Iterator[Outcome]:
    """The outcome of every record, or one of the whole file if it is no log."""
    with on_disk(log, copies) as path:
        kind = other_kind(path)
        if kind is not None:
            yield NotUsed(0, "other_file", f"{path.name} is {kind}")
        else:
            yield from parse_log(path, size, sha256, rules, log, render)


class Tally:
    """What became of the records of one log.

    counts: "records", "accepted", "texts" (of these), "prompts" (in texts), "format:NAME",
    "finish:REASON", "dropped:FIELD", "drift:..." (`_drift`), and by class "reject:REASON" and
    "unused:REASON". names: "model:NAME" of samples, "REASON:WHAT" of others.
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
            self.counts[f"format:{outcome['source']}"] += 1
            self.counts.update(f"dropped:{name}" for name in outcome["dropped"])
            if "text_id" in outcome:
                self.counts["texts"] += 1
                self.counts["prompts"] += len(outcome["answers"])
                return
            self.counts[f"finish:{outcome['finish_reason']}"] += 1
            if counted := outcome.get("counted_tokens"):
                self._drift(counted, outcome["output_tokens"])
            if outcome["model"] is not None:
                self._name(f"model:{outcome['model']}")

    def _drift(self, counted: int, encoded: int) -> None:
        """Compare the log's own count of an answer's tokens with that of its re-encoded text."""
        self.counts["drift:answers"] += 1
        self.counts["drift:other"] += counted != encoded
        self.counts["drift:counted"] += counted
        self.counts["drift:encoded"] += encoded

    def _name(self, name: str) -> None:
        name = name if len(name) <= MAX_NAME else name[:MAX_NAME] + "..."
        kind = name.partition(":")[0] + ":"
        if name not in self.names and sum(n.startswith(kind) for n in self.names) >= MAX_NAMES:
            name = kind + "(others)"
        self.names[name] += 1


class _Shards:
    """Rows in, shards out; equal samples or texts within a shard are one row with a count."""

    def __init__(self, table: Table, key: str):
        self.table, self.key = table, key
        # Rows of acceptance have a sample_id, but merge with no other.
        self.name = table.schema.names[0] if "conversation_id" in table.schema.names[:2] else None
        self.rows: list[dict[str, Any]] = []
        self.packed: list[pa.Table] = []
        self.places: dict[Any, int] = {}  # of a sample among the rows of the shard
        self.repeats: list[int] = []
        self.size = self.unpacked = 0
        self.shards: list[Shard] = []

    def add(self, row: dict[str, Any], size: int) -> None:
        # Under another label it is another row: store.traffic_table needs to see every label.
        name = (row[self.name], row["conversation_id"]) if self.name else len(self.repeats)
        place = self.places.setdefault(name, len(self.repeats))
        if place < len(self.repeats):
            self.repeats[place] += 1
            return
        self.repeats.append(1)
        self.rows.append(row)
        self.size += size
        self.unpacked += size
        if len(self.rows) >= PACKED or self.unpacked >= PACKED_TOKENS:
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
        self.rows, self.unpacked = [], 0

    def _write(self) -> None:
        self._pack()
        table = pa.concat_tables(self.packed)
        if self.name:
            column = table.schema.get_field_index("repeat_count")
            counts = pa.array(self.repeats, pa.int32())
            table = table.set_column(column, table.schema.field(column), counts)
        self.packed, self.places, self.repeats, self.size = [], {}, [], 0
        self.shards.append(self.table.write(table))
