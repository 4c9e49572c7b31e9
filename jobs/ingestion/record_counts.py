"""How many records of all logs were accepted, rejected or unused and why; and when that is an
error.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jobs.base.config import Config
from jobs.base.console import console, print_table
from store.log_states import LogState
from store.rates import exceeds
from store.rejection_reasons import reason_of

REJECT, UNUSED, FINISH = "reject:", "unused:", "finish:"
FORMAT, DROPPED, DRIFT = "format:", "dropped:", "drift:"
"""Classes of counted outcomes; they begin a count's name, such as "reject:json"."""
SHOWN = 5
"""Most names in one message."""


@dataclass(frozen=True)
class RecordCounts:
    """`total`: records by outcome. `names`: what was found under a reason, such as model names.
    `examples`: one mapping per log, reason -> file:byte of its first record.
    """

    total: Counter[str]
    names: Counter[str]
    examples: list[Mapping[str, str]]

    @classmethod
    def of(cls, states: Iterable[LogState]) -> "RecordCounts":
        """The sum over these states of logs."""
        found = cls(Counter(), Counter(), [])
        for state in states:
            found.total.update(state.counts)
            found.names.update(state.names)
            found.examples.append(state.examples)
        return found

    def of_class(self, kind: str) -> dict[str, int]:
        """Number of records by reason, for one class; the most frequent first."""
        return _stripped(self.total, kind)

    def named(self, reason: str) -> str:
        """What was found under a reason, with counts: "qwen3-8b (8), llama (4)"."""
        found = _stripped(self.names, f"{reason}:")
        shown = ", ".join(f"{name} ({count})" for name, count in [*found.items()][:SHOWN])
        return shown + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")

    def meaning(self, reason: str) -> str:
        """A reason in words, with the names found under it."""
        found = self.named(reason)
        return f"{reason}: {reason_of(reason).meaning}" + (f": {found}" if found else "")


def _stripped(counts: Counter[str], prefix: str) -> dict[str, int]:
    return {
        name.removeprefix(prefix): count
        for name, count in counts.most_common()
        if name.startswith(prefix)
    }


def check_counts(cfg: Config, logs: list[str], counts: RecordCounts) -> None:
    """Raise ValueError if nothing may be published: no record, answers of several models, or
    significantly more rejected records than ingest.max_reject_rate.
    """
    if not counts.total["records"]:
        shown = ", ".join(logs[:3]) + (", ..." if len(logs) > 3 else "")
        raise ValueError(
            f"no record in {len(logs)} log file(s): {shown}; has the server answered a request to "
            "/v1/chat/completions or /v1/completions since capture was switched on? Others are not "
            "recorded: flywheel_capture_total in its /metrics counts them. Name other logs with "
            "ingest.logs=PATH"
        )
    if len(_stripped(counts.names, "model:")) > 1 and not cfg.ingest.models:
        others = counts.total["reject:other_model"]
        more = f"; {others} more are by another model than was asked for" if others else ""
        raise ValueError(
            f"the logs hold answers of several models: {counts.named('model')}{more}. Only the "
            "target's may be learned from: list the names it answers under in ingest.models, for "
            "instance ingest.models=[NAME]; nothing was published"
        )
    rejected = counts.of_class(REJECT)
    rate = sum(rejected.values()) / counts.total["records"]
    if not exceeds(sum(rejected.values()), counts.total["records"], cfg.ingest.max_reject_rate):
        return
    worst = next(iter(rejected))
    example = next(examples[worst] for examples in counts.examples if worst in examples)
    raise ValueError(
        f"{sum(rejected.values())} of {counts.total['records']} records rejected ({rate:.1%} > "
        f"ingest.max_reject_rate {cfg.ingest.max_reject_rate:.1%}), nothing was published; mostly "
        f"{counts.meaning(worst)}, first at byte {example.rpartition(':')[2]} of "
        f"{example.rpartition(':')[0]}: {reason_of(worst).fix}. All are in {cfg.place('rejects')}"
    )


def check_use(samples: int, counts: RecordCounts) -> None:
    """Raise ValueError if no record is accepted and there is no older traffic; with older traffic
    only print a note. `samples`: samples in traffic/.
    """
    if counts.total["accepted"]:
        return
    worst, count = Counter(counts.of_class(UNUSED) | counts.of_class(REJECT)).most_common(1)[0]
    message = (
        f"none of the {counts.total['records']} records can be used; {count} because of "
        f"{counts.meaning(worst)}. What to do: {reason_of(worst).fix}"
    )
    if not samples:
        raise ValueError(message)
    console.print(f"note: {message}")


def print_reasons(title: str, counts: RecordCounts, kind: str) -> None:
    """Print a row for each reason of one class, with an example; nothing if there is no reason."""
    found = counts.of_class(kind)
    if not found:
        return
    first = {reason: at for examples in counts.examples for reason, at in examples.items()}
    rows = [
        (reason, n, counts.meaning(reason).partition(": ")[2], first[reason])
        for reason, n in found.items()
    ]
    print_table(title, ["reason", "records", "meaning", "for instance (byte)"], rows)


def print_dropped(counts: RecordCounts) -> None:
    """Print what was left out of accepted records, and how far re-encoded answers are from the
    counts of their logs; nothing if there is nothing.
    """
    if found := counts.of_class(DROPPED):
        print_table("Left out of accepted records", ["what", "records"], [*found.items()])
    if drift := counts.of_class(DRIFT):
        other, answers, encoded, counted = (
            drift.get(name, 0) for name in ("other", "answers", "encoded", "counted")
        )
        console.print(
            f"re-encoded: {other} of {answers} answers have another number of tokens than their "
            f"logs say ({encoded} instead of {counted})"
        )
