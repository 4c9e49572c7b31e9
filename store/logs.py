"""Request logs to traffic rows: every line becomes rows, a counted refusal, or a stated reject.

Two shapes are read, one JSON object a line:
  capture  what serving.capture writes: {"v": 1, "prompt_ids": [..], "output_ids": [..], ...}
  openai   {"request": {..}, "response": {..}} of /v1/chat/completions or /v1/completions, with the
           ids vLLM adds for `return_token_ids`: response.prompt_token_ids, choices[].token_ids
           (completions: choices[].prompt_token_ids)
Served ids are the truth, so text is neither needed nor read.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from store.ids import prompt_conversation, sample_id, split_of
from store.shaping import shaped_by

MAX_LINE_BYTES = 64 << 20
MAX_REJECT_BYTES = 64 << 10
# What served tokens may end with. After `length`, `abort` and a missing reason the text is cut, but
# its tokens are the target's own; nothing labels an end of turn that never came.
FINISH_REASONS = {"stop", "length", "tool_calls", "function_call", "repetition", "abort", None}

METADATA = (
    "conversation_id",
    "domain",
    "language",
    "tenant",
    "consent",
    "target_id",
    "adapter",
)
"""What the openai shape reads from the request's metadata."""

REASONS = {
    "not_json": "the line is not a JSON value",
    "cut_line": "the last line ends inside a JSON value (writer killed, or still writing)",
    "line_too_long": f"a line of more than {MAX_LINE_BYTES >> 20} MiB",
    "not_an_object": "JSON, but not an object",
    "unknown_format": "neither a capture record nor a request/response pair",
    "unknown_version": "a capture record of another format version",
    "no_token_ids": "no prompt or output token ids (serve with return_token_ids)",
    "bad_token_ids": "token ids that are not a list of integers",
    "token_outside_vocabulary": "an id the target does not have: another model's traffic?",
    "other_target": "the record names another target_id",
    "adapter": "served with a LoRA adapter: not the target's own output",
    "empty_loss_mask": "no output token, so nothing to learn from",
    "short_output": "fewer output tokens than ingest.min_output_tokens",
    "finish_error": "the request failed",
    "finish_content_filter": "the answer was filtered",
    "finish_unknown": "a finish reason that is not known",
    "bad_field": "a field of the wrong type or range",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """What a record must satisfy, and what it gets where it names nothing itself."""

    target_id: str
    vocab_size: int
    default_domain: str
    min_output_tokens: int
    val_percent: float
    test_percent: float


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that is not used: where it starts, why, and its bytes (cut at MAX_REJECT_BYTES)."""

    offset: int
    reason: str  # a key of REASONS, for bad_field with the field's name: "bad_field:top_k"
    raw: bytes


@dataclass(frozen=True, slots=True)
class NoConsent:
    """A record whose owner did not agree: counted, never stored, not even as a reject."""

    offset: int


class _Refused(Exception):
    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def digest_log(path: Path, sizes: set[int]) -> tuple[int, str, dict[int, str]]:
    """(bytes, sha256, {n: sha256 of the first n bytes} for the `sizes` that fit) in one reading.

    The prefixes tell whether a log is an older one that has grown.
    """
    digest, done, prefixes = hashlib.sha256(), 0, {}
    with open(path, "rb") as stream:
        total = path.stat().st_size
        for stop in sorted({n for n in sizes if n <= total} | {total}):
            while done < stop:
                block = stream.read(min(1 << 20, stop - done))
                if not block:
                    raise ValueError(f"{path}: became shorter while it was read; run again")
                digest.update(block)
                done += len(block)
            prefixes[stop] = digest.hexdigest()
    return total, digest.hexdigest(), prefixes


def parse_log(
    path: Path, size: int, sha256: str, rules: Rules
) -> Iterator[dict[str, Any] | Reject | NoConsent]:
    """Outcomes of the first `size` bytes of a log, in file order: TRAFFIC rows as dicts (ids are
    int32 arrays), Reject or NoConsent.

    Memory holds one line. Blank lines hold no record and give no outcome. Raises ValueError when
    the bytes read do not have the given sha256: the log was rewritten meanwhile.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        offset = 0
        while offset < size:
            line = stream.readline(min(MAX_LINE_BYTES, size - offset))
            start, whole = offset, line.endswith(b"\n") or offset + len(line) >= size
            offset += len(line)
            digest.update(line)
            if not whole:
                offset = _skip_line(stream, offset, size, digest)
                yield Reject(start, "line_too_long", line[:MAX_REJECT_BYTES])
            elif line.strip():
                yield from _parse_line(line, start, rules)
    if digest.hexdigest() != sha256:
        raise ValueError(f"{path}: changed while it was read; run again")


def _skip_line(stream: Any, offset: int, size: int, digest: Any) -> int:
    while offset < size:
        rest = stream.readline(min(1 << 20, size - offset))
        digest.update(rest)
        offset += len(rest)
        if not rest or rest.endswith(b"\n"):
            break
    return offset


def _parse_line(line: bytes, offset: int, rules: Rules) -> Iterator[Any]:
    try:
        records = _records(line)
    except _Refused as refused:
        yield Reject(offset, refused.reason, line[:MAX_REJECT_BYTES])
        return
    for record, source in records:
        if not _consents(record.get("consent")):
            yield NoConsent(offset)
            continue
        try:
            yield _row(record, source, rules)
        except _Refused as refused:
            yield Reject(offset, refused.reason, line[:MAX_REJECT_BYTES])


def _records(line: bytes) -> list[tuple[dict[str, Any], str]]:
    """(record with the capture format's names, source) for each answer on the line."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise _Refused("not_json" if line.endswith(b"\n") else "cut_line") from None
    if not isinstance(value, dict):
        raise _Refused("not_an_object")
    if "v" in value:
        if value["v"] != 1:
            raise _Refused("unknown_version")
        return [(value, "capture")]
    request, response = value.get("request"), value.get("response")
    if isinstance(request, dict) and isinstance(response, dict):
        return [(record, "openai") for record in _from_openai(request, response)]
    raise _Refused("unknown_format")


def _from_openai(request: dict[str, Any], response: dict[str, Any]) -> list[dict[str, Any]]:
    choices = response.get("choices")
    if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
        raise _Refused("unknown_format")
    if not choices:
        raise _Refused("no_token_ids")
    metadata = request.get("metadata") or {}
    template = request.get("chat_template_kwargs") or {}
    if not isinstance(metadata, dict) or not isinstance(template, dict):
        raise _Refused("bad_field:metadata")
    shared = {name: request.get(name) for name in ("temperature", "top_p", "top_k", "seed")}
    shared |= {name: metadata.get(name) for name in METADATA}
    shared |= {
        "shaped": shaped_by(request, {}),
        "request_id": response.get("id"),
        "captured_at": response.get("created"),
        "thinking": template.get("enable_thinking"),
    }
    return [
        shared
        | {
            "prompt_ids": response.get("prompt_token_ids") or choice.get("prompt_token_ids"),
            "output_ids": choice.get("token_ids"),
            "finish_reason": choice.get("finish_reason"),
        }
        for choice in choices
    ]


def _row(record: dict[str, Any], source: str, rules: Rules) -> dict[str, Any]:
    if record.get("target_id") not in (None, rules.target_id):
        raise _Refused("other_target")
    if record.get("adapter") is not None:
        raise _Refused("adapter")
    finish = _text(record, "finish_reason")
    if finish not in FINISH_REASONS:
        known = finish in ("error", "content_filter")
        raise _Refused(f"finish_{finish}" if known else "finish_unknown")
    prompt, output = _ids(record, "prompt_ids", rules), _ids(record, "output_ids", rules)
    if not len(prompt):
        raise _Refused("no_token_ids")
    if not len(output):
        raise _Refused("empty_loss_mask")
    if len(output) < rules.min_output_tokens:
        raise _Refused("short_output")
    conversation = _text(record, "conversation_id") or prompt_conversation(prompt)
    return {
        "sample_id": sample_id(rules.target_id, prompt, output),
        "conversation_id": conversation,
        "split": split_of(conversation, rules.val_percent, rules.test_percent),
        "domain": _text(record, "domain") or rules.default_domain,
        "source": source,
        "captured_at": _time(record.get("captured_at")),
        "target_id": rules.target_id,
        "prompt_ids": prompt,
        "output_ids": output,
        "loss_mask": [{"start": len(prompt), "end": len(prompt) + len(output)}],
        "ids_source": "served",
        "finish_reason": finish,
        "temperature": _number(record, "temperature"),
        "top_p": _number(record, "top_p"),
        "top_k": _integer(record, "top_k", 31),
        "seed": _integer(record, "seed", 63),
        "thinking": _flag(record, "thinking"),
        "tenant": _text(record, "tenant"),
        "consent": None if record.get("consent") is None else True,
        "repeat_count": 1,
        "request_id": _text(record, "request_id"),
        "adapter": None,
        "language": _text(record, "language"),
        "shaped": _shaped(record),
    }


def _shaped(record: dict[str, Any]) -> str | None:
    """The names as one text; None if the record does not say."""
    names = record.get("shaped")
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _Refused("bad_field:shaped")
    return ",".join(sorted(names))


def _ids(record: dict[str, Any], name: str, rules: Rules) -> np.ndarray:
    """Token ids [n] int32, checked against the vocabulary."""
    ids = record.get(name)
    if ids is None:
        raise _Refused("no_token_ids")
    # By exact type (True is no token), in C: this check reads every token of every log.
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise _Refused("bad_token_ids")
    if ids and not (min(ids) >= 0 and max(ids) < rules.vocab_size):
        raise _Refused("token_outside_vocabulary")
    return np.array(ids, np.int32)


def _consents(value: Any) -> bool:
    """Nothing said is consent by configuration of the capture; anything but a clear yes is a no."""
    return value is None or value is True or str(value).lower() in ("true", "yes", "1")


def _text(record: dict[str, Any], name: str) -> str | None:
    value = record.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise _Refused(f"bad_field:{name}")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can carry lone surrogates, which Parquet text cannot
        raise _Refused(f"bad_field:{name}") from None
    return value


def _number(record: dict[str, Any], name: str) -> float | None:
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 3e38:
        raise _Refused(f"bad_field:{name}")
    if not math.isfinite(value):
        raise _Refused(f"bad_field:{name}")
    return float(value)


def _integer(record: dict[str, Any], name: str, bits: int) -> int | None:
    value = record.get(name)
    if value is not None and (type(value) is not int or not -(2**bits) <= value < 2**bits):
        raise _Refused(f"bad_field:{name}")
    return value


def _flag(record: dict[str, Any], name: str) -> bool | None:
    value = record.get(name)
    if value is not None and not isinstance(value, bool):
        raise _Refused(f"bad_field:{name}")
    return value


def _time(value: Any) -> datetime | None:
    """ISO text with an offset, or epoch seconds, as UTC; None stays None."""
    if value is None:
        return None
    try:
        if isinstance(value, str):
            time = datetime.fromisoformat(value)
            if time.tzinfo is None:
                raise ValueError("no offset: not a moment")
            return time.astimezone(UTC)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, UTC)
    except (ValueError, OverflowError, OSError):
        pass
    raise _Refused("bad_field:captured_at")
