"""From captured records to rows of acceptance/: what production accepted, one row per choice."""

import re
from collections.abc import Sequence
from operator import le
from typing import Any

from store import log_fields
from store.ids import drafter_version
from store.log_fields import Record, Refused

ROUNDS = ("accepted", "drafted")
MOST_DRAFTS = 2**15 - 1  # the columns are int16
_SHA256 = re.compile("[0-9a-f]{64}")


def are_of(accepted: Sequence[int], drafted: Sequence[int], num_output: int) -> bool:
    """Whether these rounds can have made an answer of `num_output` tokens: the first comes from
    prefill, and each round adds one token to its accepted drafts.
    """
    made = sum(accepted) + len(accepted) + 1
    if len(accepted) != len(drafted) or made != num_output:
        return False
    inside = min(accepted, default=0) >= 0 and max(drafted, default=0) <= MOST_DRAFTS
    return inside and all(map(le, accepted, drafted))


def acceptance_row(record: Record, row: dict[str, Any]) -> dict[str, Any] | None:
    """The ACCEPTANCE row (without `log` and `batch`) of a record with the TRAFFIC row `row`.

    None if there is nothing to tell: no drafter, a swap during the request, rounds that are not
    known, or an answer of one token. Raises Refused for rounds that are not of this answer.
    """
    sha256 = log_fields.text(record, "drafter_sha256")
    accepted, drafted = (_counts(record, name) for name in ROUNDS)
    if not sha256 or not accepted or drafted is None:
        return None
    if not _SHA256.fullmatch(sha256):
        raise Refused("bad_field:drafter_sha256")
    if not are_of(accepted, drafted, row["output_tokens"]):
        raise Refused("bad_field:accepted")
    name = row["request_id"]
    choice = log_fields.integer(record, "choice", 31) or 0
    return {
        **{key: row[key] for key in SAME},
        "request_id": f"{name}/{choice}" if name and choice else name,
        "origin": "served",
        "drafter_version": drafter_version(sha256),
        "version": log_fields.text(record, "drafter"),
        "k": log_fields.integer(record, "k", 31),
        "block_size": None,  # a server knows how much it drafts, not how much it could
        "accepted": accepted,
        "drafted": drafted,
        "started_at": log_fields.time(record, "started_at"),
        "finished_at": log_fields.time(record, "finished_at"),
        "replica": log_fields.text(record, "replica") or "",
        "concurrency": log_fields.integer(record, "concurrency", 31),
        "repeat_count": 1,
    }


SAME = (
    "sample_id",
    "conversation_id",
    "target_id",
    "domain",
    "temperature",
    "prompt_tokens",
    "output_tokens",
)
"""Columns that a row has from that of its sample."""


def _counts(record: Record, name: str) -> list[int] | None:
    found = record.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or not set(map(type, found)) <= {int}:
        raise Refused(f"bad_field:{name}")
    return found
