"""The acceptance of the last requests of this server process: rows in memory, and counters.

`read` is what GET /flywheel/acceptance answers. There is one row for each choice of an answer, with
the columns of `Row`. Rows are bounded in number and in rounds: the oldest are lost, and counted.
It works without a capture, and holds no text and no token ids. serving.watch calls `add`, on the
event loop, like whoever calls `read`.

/metrics has, by `drafter` (as in response headers: serving.loaded.Loaded.label):
  flywheel_requests_total{outcome}      finished | failed | aborted | uncounted
  flywheel_tokens_total                 output tokens of finished choices
  flywheel_rounds_total                 rounds of counted choices, and by position (1 to 32):
  flywheel_drafts_offered_total{position}, flywheel_drafts_accepted_total{position}
There is no label that a client chooses. The series of all but the latest LABELS drafters are
removed, so their number is bounded, however often the drafter changes.
"""

import time
from collections import Counter as Counts
from collections import deque
from itertools import accumulate
from typing import Any, TypedDict

from prometheus_client import Counter

MAX_ROWS = 4096
MAX_ROUNDS = 1 << 19  # over all rows: 8 MiB of lists
MOST_ROWS = 1000  # in one answer; the next begins where it ends
POSITIONS = 32
LABELS = 8
SWAPPED = "swapped"
"""Label of requests during which the drafter changed."""


class Row(TypedDict):
    """One choice of a finished answer. For a request without consent, `request_id` is empty, and
    `domain`, `conversation_id` and `tenant` are null.
    """

    seq: int
    request_id: str
    started_at: float  # unix seconds, as finished_at
    finished_at: float
    seconds: float
    drafter_version: str | None  # "" without a drafter; None if it changed during the request
    drafter_sha256: str | None
    domain: str | None
    conversation_id: str | None
    tenant: str | None
    temperature: float | None
    k: int  # the largest that the server drafts with; 0 without a drafter
    accepted: list[int]  # per round, cut at the end of text
    drafted: list[int]
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    first_token_seconds: float | None
    concurrency: int  # requests in flight when it ended, with this one


_REQUESTS = Counter("flywheel_requests", "Requests by what became of them", ["drafter", "outcome"])
_TOKENS = Counter("flywheel_tokens", "Output tokens of finished choices", ["drafter"])
_ROUNDS = Counter("flywheel_rounds", "Rounds of counted choices", ["drafter"])
_OFFERED = Counter(
    "flywheel_drafts_offered", "Rounds with a draft at this position", ["drafter", "position"]
)
_ACCEPTED = Counter("flywheel_drafts_accepted", "Rounds that accepted it", ["drafter", "position"])


class Feed:
    """The rows and what they sum up to; one of each process is in use."""

    def __init__(self) -> None:
        self.rows: deque[Row] = deque()
        self.rounds = 0  # of the rows that are kept
        self.seq = 0
        self.requests = 0
        self.failed = 0
        self.started = time.time()
        self.labels: dict[str, None] = {}  # in the order of their last use

    def read(self, after: int) -> dict[str, Any]:
        """The rows after `after`, at most MOST_ROWS, and where the next answer begins (`next`).

        lost: rows after `after` that were dropped before. requests, failed: all of this process.
        started: when it began (unix seconds); with another one, `seq` starts anew, so an `after`
        that was never reached counts as 0.
        """
        after = after if 0 <= after <= self.seq else 0
        kept = self.seq - len(self.rows)  # rows up to this one are gone
        first = max(after, kept)
        rows = [row for row in self.rows if row["seq"] > first][:MOST_ROWS]
        return {
            "rows": rows,
            "next": rows[-1]["seq"] if rows else self.seq,
            "lost": first - after,
            "requests": self.requests,
            "failed": self.failed,
            "started": self.started,
        }

    def count(self, label: str, outcome: str) -> None:
        """Count one HTTP request; outcomes are in the module's docstring."""
        self.requests += 1
        self.failed += outcome == "failed"
        self._used(label)
        _REQUESTS.labels(label, outcome).inc()

    def add(self, label: str, row: Row) -> None:
        """Keep a row, whose `seq` is set here, and count its rounds."""
        self.seq += 1
        row["seq"] = self.seq
        self.rows.append(row)
        self.rounds += len(row["accepted"])
        while len(self.rows) > MAX_ROWS or (self.rounds > MAX_ROUNDS and len(self.rows) > 1):
            self.rounds -= len(self.rows.popleft()["accepted"])
        self._used(label)
        _TOKENS.labels(label).inc(row["output_tokens"])
        _ROUNDS.labels(label).inc(len(row["accepted"]))
        for counter, counts in ((_OFFERED, row["drafted"]), (_ACCEPTED, row["accepted"])):
            for position, rounds in enumerate(_at_least(counts), 1):
                counter.labels(label, position).inc(rounds)

    def _used(self, label: str) -> None:
        """Remember that this label is in use, and forget the series of the oldest beyond LABELS."""
        self.labels.pop(label, None)
        self.labels[label] = None
        if len(self.labels) > LABELS:
            oldest = next(iter(self.labels))
            del self.labels[oldest]
            for counter in (_REQUESTS, _TOKENS, _ROUNDS, _OFFERED, _ACCEPTED):
                counter.remove_by_labels({"drafter": oldest})


def _at_least(counts: list[int]) -> list[int]:
    """Rounds whose count is at least 1, 2, ... up to POSITIONS. [2, 0, 1] -> [2, 1]."""
    found = Counts(min(count, POSITIONS) for count in counts)
    most = max(found, default=0)
    return [*accumulate(found[n] for n in range(most, 0, -1))][::-1]


_feed = Feed()
add, count, read = _feed.add, _feed.count, _feed.read
