"""From logs to rows: every record becomes rows, or refusals with a reason.

A record with token ids becomes a row of TRAFFIC: served ids are the truth, so text is not read. A
record with messages only becomes a row of TEXTS, prompts that the target answers anew. What a file
looks like is in store/log_files.py and what a record looks like in store/record_readers.py.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from store import log_fields
from store.consent import consents
from store.ids import PROMPT_LABEL, prompt_id, sample_id, says_nothing, split_of
from store.labels import LABELS, labels
from store.log_elements import elements
from store.log_fields import Refused
from store.log_files import container, damage, open_log
from store.log_rows import as_bytes, csv_rows, parquet_rows
from store.objects import decode
from store.privacy import answers, marked, may_refuse, redacted
from store.record_readers import read_records, recognised
from store.rejection_reasons import MAX_LINE_BYTES, reason_of
from store.served_rounds import acceptance_row
from store.text_rows import text_row

BOM = b"\xef\xbb\xbf"
MAX_REJECT_BYTES = 64 << 10
# Finish reasons of usable answers. After `length`, `abort` or a missing reason the text is cut off,
# but its tokens are the target's own, and no label claims an end of turn that never came.
FINISH_REASONS = {"stop", "length", "tool_calls", "function_call", "repetition", "abort", None}

PERSONAL = (b"hashed_ip", b"ip_address", b"user-agent")
"""Of records with one of these fields, no bytes are kept."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a record must satisfy, and the values it gets for what it does not name."""

    target_id: str
    vocab_size: int
    default_domain: str
    min_output_tokens: int
    val_percent: float
    test_percent: float
    former_ids: tuple[str, ...] = ()  # older ids of the same target: read as target_id
    models: tuple[str, ...] = ()  # names the target answers under; empty: any name
    text: str = "prompts"  # what answers without token ids are used as: prompts | answers


@dataclass(frozen=True, slots=True)
class Reject:
    """A damaged or untrustworthy record: where it starts, why, and its bytes.

    `raw` is cut at MAX_REJECT_BYTES, and empty where the bytes may hold what must not be kept.
    """

    offset: int
    reason: str  # a key of rejection_reasons, perhaps with a field: "bad_field:top_k"
    raw: bytes
    detail: str = ""  # what was found instead


@dataclass(frozen=True, slots=True)
class NotUsed:
    """A readable record that is not for this drafter: counted, nothing of it is kept."""

    offset: int
    reason: str
    detail: str = ""


Row = dict[str, Any]
"""TRAFFIC columns but `log` (ids are int32 arrays), and some that are none: `model`, the model name
that answered (None if the record carries our target_id, or no model name), `acceptance`, the row of
its rounds (store/served_rounds.py) or None, and `dropped`, names of fields whose values were of no
use. Or TEXTS columns but `log`, with `dropped` (store/text_rows.py)."""
Outcome = Row | Reject | NotUsed
Render = Callable[[Row], Iterator[tuple[list[int], list[int], str | None]]]
"""(prompt ids, output ids, finish reason) of each answer in a row of TEXTS; may raise Refused."""


def parse_log(
    path: Path, size: int, sha256: str, rules: Rules, name: str = "", render: Render | None = None
) -> Iterator[Outcome]:
    """Outcomes of the first `size` bytes of a log, in file order. Offsets and sizes of a compressed
    log are those of its decompressed bytes; a row of Parquet has its number as offset.

    One record is in memory at a time. Blank lines give no outcome. Raises ValueError if the bytes
    do not have the given sha256: the log was rewritten meanwhile. `name`: what that message calls
    it. `render`: for rules.text "answers", where texts become samples.
    """
    with open_log(path) as stream:
        known = _Known(stream, size)
        kind = container(path)
        read = {"lines": _lines, "elements": _elements, "csv": _csv}.get(kind)
        found = read(known, rules) if read else _parquet(path, rules)
        for outcome in found:
            if render is not None and isinstance(outcome, dict) and "messages" in outcome:
                yield from _rendered(outcome, rules, render)
            else:
                yield outcome
        if known.finish() != sha256:
            raise ValueError(f"{name or path}: changed while it was read; run again")
        if broken := damage(stream):
            yield Reject(known.offset, "damaged_file", b"", broken)


class _Known:
    """A stream of at most `size` bytes, and the sha256 of what was read of it."""

    def __init__(self, stream: Any, size: int):
        self.stream, self.left, self.offset = stream, size, 0
        self.digest = hashlib.sha256()

    def read(self, most: int) -> bytes:
        return self._seen(self.stream.read(min(most, self.left)))

    def readline(self, most: int) -> bytes:
        return self._seen(self.stream.readline(min(most, self.left)))

    def _seen(self, data: bytes) -> bytes:
        self.digest.update(data)
        self.left -= len(data)
        self.offset += len(data)
        return data

    def finish(self) -> str:
        """The sha256 of all bytes."""
        while self.read(1 << 20):
            pass
        return self.digest.hexdigest()


def _lines(known: _Known, rules: Rules) -> Iterator[Outcome]:
    """Of a file with an object on each line."""
    while line := known.readline(MAX_LINE_BYTES):
        start, whole = known.offset - len(line), line.endswith(b"\n") or not known.left
        broken = None if known.left else damage(known.stream)
        if start == 0 and line.startswith(BOM):
            line, start = line[len(BOM) :], len(BOM)
        if not whole:
            while (rest := known.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            yield Reject(start, "line_too_long", b"")  # the skipped part may hold a refusal
        elif line.strip() and not (broken and _is_cut(line)):
            yield from _parse_line(line, start, rules)


def _elements(known: _Known, rules: Rules) -> Iterator[Outcome]:
    """Of one JSON array, or of objects over several lines."""
    first = True
    for offset, raw, whole in elements(known, MAX_LINE_BYTES):
        if raw is None:
            yield Reject(offset, "line_too_long", b"")
            continue
        value = _load(raw) if whole else _UNREADABLE
        if first and value is not _UNREADABLE and recognised(value) is None:
            consent = consents(*answers(value))
            yield NotUsed(0, "other_file" if consent else "no_consent")
            return
        first = False
        if value is not _UNREADABLE:
            yield from _outcomes(value, raw, offset, rules)
        elif not (not whole and damage(known.stream)):
            yield _rejected(offset, Refused("not_json" if whole else "cut_line"), raw)


def _csv(known: _Known, rules: Rules) -> Iterator[Outcome]:
    for offset, row in csv_rows(known):
        if row is None:
            yield Reject(offset, "bad_row", b"")
        else:
            yield from _outcomes(row, as_bytes(row), offset, rules)


def _parquet(path: Path, rules: Rules) -> Iterator[Outcome]:
    number = 0
    try:
        for number, row in parquet_rows(path):
            yield from _outcomes(row, as_bytes(row), number, rules)
    except (pa.ArrowInvalid, OSError) as error:
        yield Reject(number, "damaged_file", b"", str(error))


def _is_cut(line: bytes) -> bool:
    return not line.endswith(b"\n") and _load(line) is _UNREADABLE


def _parse_line(line: bytes, offset: int, rules: Rules) -> Iterator[Outcome]:
    value = _load(line)
    if value is not _UNREADABLE:
        yield from _outcomes(value, line, offset, rules)
        return
    # A writer may fail inside a record and write the next one on the same line. That one is whole.
    at = max(line.rfind(b'{"v"'), line.rfind(b'{"request"'))
    value = _load(line[at:]) if at > 0 else _UNREADABLE
    if isinstance(value, dict):
        yield _rejected(offset, Refused("torn_line"), line[:at])
        yield from _outcomes(value, line[at:], offset + at, rules)
    else:
        reason = "not_json" if line.endswith(b"\n") else "cut_line"
        yield _rejected(offset, Refused(reason), line)


def _outcomes(value: Any, raw: bytes, offset: int, rules: Rules) -> Iterator[Outcome]:
    """Outcomes of one JSON value. Consent is checked first, then redaction: nothing may store a
    byte before that.
    """
    if not isinstance(value, dict):
        yield _rejected(offset, Refused("not_an_object"), raw)
        return
    said = answers(value)
    if not consents(*said):
        yield NotUsed(offset, "no_consent")
        return
    if redacted(value, raw):
        yield NotUsed(offset, "redacted")
        return
    try:
        source, records = read_records(value)
    except Refused as refused:
        yield _rejected(offset, refused, raw)
        return
    consent = None if all(one is None for one in said) else True
    for record in records:
        try:
            if record.get("messages") is not None:
                found = text_row(record, source, consent, rules.default_domain)
                yield found | {"offset": offset}
                continue
            row = _row(record, source, rules)
            row["consent"] = consent
            row["acceptance"] = acceptance_row(record, row) if source == "capture" else None
            yield row
        except Refused as refused:
            yield _rejected(offset, refused, raw)


def _rendered(text: Row, rules: Rules, render: Render) -> Iterator[Outcome]:
    """Samples of the answers of a text, re-encoded; where the log counts tokens, with the count."""
    try:
        for prompt, output, finish in render(text):
            ids = {"prompt_ids": prompt, "output_ids": output, "finish_reason": finish}
            at = text["captured_at"]
            record = text | ids | {"captured_at": at and at.isoformat()}
            row = _row(record, text["source"], rules)
            yield row | {
                "ids_source": "reencoded",
                "consent": text["consent"],
                "acceptance": None,
                "counted_tokens": text["counted_tokens"],
                "dropped": text["dropped"],
            }
    except Refused as refused:
        yield NotUsed(text["offset"], refused.reason, refused.detail)


def _rejected(offset: int, refused: Refused, raw: bytes) -> Reject | NotUsed:
    """The outcome of a refusal, by the class of its reason. Bytes are kept only where neither
    consent nor redaction forbids it.
    """
    if not reason_of(refused.reason).damaged:
        return NotUsed(offset, refused.reason, refused.detail)
    if may_refuse(raw):
        return NotUsed(offset, "no_consent")
    kept = b"" if marked(raw) or any(map(raw.__contains__, PERSONAL)) else raw[:MAX_REJECT_BYTES]
    return Reject(offset, refused.reason, kept, refused.detail)


_UNREADABLE = object()


def _load(line: bytes) -> Any:
    try:
        return decode(line)
    except (ValueError, RecursionError):
        return _UNREADABLE


def _row(record: dict[str, Any], source: str, rules: Rules) -> Row:
    model = _model(record, rules)
    finish = log_fields.text(record, "finish_reason")
    if finish not in FINISH_REASONS:
        known = finish in ("error", "content_filter")
        raise Refused(f"finish_{finish}" if known else "finish_unknown")
    prompt = log_fields.ids(record, "prompt_ids", rules.vocab_size)
    output = log_fields.ids(record, "output_ids", rules.vocab_size)
    if not len(prompt):
        raise Refused("no_token_ids")
    if not len(output):
        raise Refused("empty_loss_mask")
    if len(output) < rules.min_output_tokens:
        raise Refused("short_output")
    counted = record.get("completion_tokens") if source != "capture" else None
    if type(counted) is int and counted != len(output):
        raise Refused("ids_incomplete")
    named, of_prompt = labels(record.items()), prompt_id(prompt)
    by_prompt = PROMPT_LABEL + of_prompt
    conversation = named["conversation_id"] or by_prompt
    if says_nothing(conversation):
        conversation = by_prompt
    shares = rules.val_percent, rules.test_percent
    return {
        "sample_id": sample_id(rules.target_id, prompt, output),
        "conversation_id": conversation,
        "split": split_of(conversation, *shares),
        "split_by_prompt": split_of(by_prompt, *shares),
        "domain": named["domain"] or rules.default_domain,
        "source": source,
        "captured_at": log_fields.time(record, "captured_at"),
        "target_id": rules.target_id,
        "prompt_ids": prompt,
        "output_ids": output,
        "loss_mask": [{"start": len(prompt), "end": len(prompt) + len(output)}],
        "ids_source": _ids_source(record, source),
        "finish_reason": finish,
        "temperature": log_fields.number(record, "temperature"),
        "top_p": log_fields.number(record, "top_p"),
        "top_k": log_fields.integer(record, "top_k", 31),
        "seed": log_fields.integer(record, "seed", 63),
        "thinking": log_fields.flag(record, "thinking"),
        "tenant": named["tenant"],
        "repeat_count": 1,
        "request_id": log_fields.text(record, "request_id"),
        "adapter": None,
        "language": named["language"],
        "shaped": log_fields.names(record, "shaped"),
        "prompt_tokens": len(prompt),
        "output_tokens": len(output),
        "prompt_id": of_prompt,
        "model": model,
        "dropped": [name for name in LABELS if isinstance(record.get(name), list | dict)],
    }


def _ids_source(record: dict[str, Any], source: str) -> str:
    """`regenerated` for what `flywheel regenerate` wrote, in the format of the capture."""
    named = log_fields.text(record, "ids_source") if source == "capture" else None
    if named not in (None, "served", "regenerated"):
        raise Refused("bad_field:ids_source")
    return named or "served"


def _model(record: dict[str, Any], rules: Rules) -> str | None:
    """The model name that answered; None if the record needs no name. Raises Refused if it was not
    the target that answered.

    A record that carries the target's own id needs no name: all aliases of a server are the target.
    """
    target = log_fields.text(record, "target_id")
    if target not in (None, rules.target_id, *rules.former_ids):
        raise Refused("other_target", target)
    if record.get("adapter") is not None:
        raise Refused("adapter", record["adapter"])
    model, asked = log_fields.text(record, "model"), log_fields.text(record, "asked_model")
    if rules.models and target is None:
        if model is not None and model not in rules.models:
            raise Refused("not_in_models", model)
        return model
    if asked not in (None, model) and model not in rules.models:
        raise Refused("other_model", f"{model}, asked for {asked}")
    return model if target is None else None
