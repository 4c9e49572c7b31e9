"""From request logs to traffic rows: every line becomes rows, or refusals with a reason.

Two formats are read, one JSON object a line:
  capture  what serving.capture writes: {"v": 1, "prompt_ids": [..], "output_ids": [..], ...}
  openai   {"request": {..}, "response": {..}} of /v1/chat/completions or /v1/completions, with the
           ids vLLM adds for `return_token_ids`: response.prompt_token_ids, choices[].token_ids
           (completions: choices[].prompt_token_ids)
Served ids are the truth, so text is neither needed nor read.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store import log_fields
from store.consent import consents
from store.ids import PROMPT_LABEL, prompt_id, sample_id, says_nothing, split_of
from store.labels import ALIASES, LABELS, labels
from store.log_fields import Refused
from store.log_files import damage, open_log
from store.objects import TWICE, decode
from store.privacy import answers, marked, may_refuse, redacted
from store.rejection_reasons import MAX_LINE_BYTES, reason_of
from store.served_rounds import acceptance_row
from store.shaped_answers import shaped_by

BOM = b"\xef\xbb\xbf"
MAX_REJECT_BYTES = 64 << 10
# Finish reasons of usable answers. After `length`, `abort` or a missing reason the text is cut off,
# but its tokens are the target's own, and no label claims an end of turn that never came.
FINISH_REASONS = {"stop", "length", "tool_calls", "function_call", "repetition", "abort", None}

METADATA = (*LABELS, *ALIASES, "target_id", "adapter")
"""What the openai format reads from the request's metadata; consent is checked before."""
TEXT_KEYS = {"messages", "conversation", "conversations", "prompt", "completion", "instruction"}
"""An object of no known format with one of these keys is a conversation as text."""


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
"""TRAFFIC columns but `log` (ids are int32 arrays), and two that are none: `model`, the model name
that answered (None if the record carries our target_id, or no model name), and `acceptance`, the
row of its rounds (store/served_rounds.py) or None."""
Outcome = Row | Reject | NotUsed


def parse_log(
    path: Path, size: int, sha256: str, rules: Rules, name: str = ""
) -> Iterator[Outcome]:
    """Outcomes of the first `size` bytes of a log, in file order. Offsets and sizes of a compressed
    log are those of its decompressed bytes.

    One line is in memory at a time. Blank lines give no outcome. Raises ValueError if the bytes do
    not have the given sha256: the log was rewritten meanwhile. `name`: what that message calls it.
    """
    digest = hashlib.sha256()
    with open_log(path) as stream:
        offset, broken = 0, None
        while offset < size:
            line = stream.readline(min(MAX_LINE_BYTES, size - offset))
            if not line:
                break
            start, whole = offset, line.endswith(b"\n") or offset + len(line) >= size
            offset += len(line)
            digest.update(line)
            broken = damage(stream) if offset >= size else None
            if start == 0 and line.startswith(BOM):
                line, start = line[len(BOM) :], len(BOM)
            if not whole:
                offset = _skip_line(stream, offset, size, digest)
                yield Reject(start, "line_too_long", b"")  # the skipped part may hold a refusal
            elif line.strip() and not (broken and _is_cut(line)):
                yield from _parse_line(line, start, rules)
        if digest.hexdigest() != sha256:
            raise ValueError(f"{name or path}: changed while it was read; run again")
        broken = broken or damage(stream)
        if broken:
            yield Reject(offset, "damaged_file", b"", broken)


def _is_cut(line: bytes) -> bool:
    return not line.endswith(b"\n") and _load(line) is _UNREADABLE


def _skip_line(stream: Any, offset: int, size: int, digest: Any) -> int:
    while offset < size:
        rest = stream.readline(min(1 << 20, size - offset))
        digest.update(rest)
        offset += len(rest)
        if not rest or rest.endswith(b"\n"):
            break
    return offset


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
        records = _records(value)
    except Refused as refused:
        yield _rejected(offset, refused, raw)
        return
    for record, source in records:
        try:
            row = _row(record, source, rules)
            row["consent"] = None if all(one is None for one in said) else True
            row["acceptance"] = acceptance_row(record, row) if source == "capture" else None
            yield row
        except Refused as refused:
            yield _rejected(offset, refused, raw)


def _rejected(offset: int, refused: Refused, raw: bytes) -> Reject | NotUsed:
    """The outcome of a refusal, by the class of its reason. Bytes are kept only where neither
    consent nor redaction forbids it.
    """
    if not reason_of(refused.reason).damaged:
        return NotUsed(offset, refused.reason, refused.detail)
    if may_refuse(raw):
        return NotUsed(offset, "no_consent")
    kept = b"" if marked(raw) else raw[:MAX_REJECT_BYTES]
    return Reject(offset, refused.reason, kept, refused.detail)


_UNREADABLE = object()


def _load(line: bytes) -> Any:
    try:
        return decode(line)
    except (ValueError, RecursionError):
        return _UNREADABLE


def _check_once(*objects: dict[Any, Any]) -> None:
    for found in objects:
        if TWICE in found:
            raise Refused("duplicate_field", found[TWICE][0])


def _records(value: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """(record with the capture format's names, source) for each answer on the line."""
    _check_once(value)
    if "v" in value:
        if value["v"] != 1:
            raise Refused("unknown_version")
        return [(value, "capture")]
    request, response = value.get("request"), value.get("response")
    if isinstance(request, dict) and isinstance(response, dict):
        return [(record, "openai") for record in _from_openai(request, response)]
    raise Refused("text_only" if TEXT_KEYS & value.keys() else "unknown_format")


def _from_openai(request: dict[str, Any], response: dict[str, Any]) -> list[dict[str, Any]]:
    _check_once(request, response)
    choices = response.get("choices")
    if response.get("error") and not choices:
        raise Refused("finish_error")
    if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
        raise Refused("unknown_format")
    if not choices:
        raise Refused("no_token_ids")
    metadata = request.get("metadata") or {}
    template = request.get("chat_template_kwargs") or {}
    if not isinstance(metadata, dict) or not isinstance(template, dict):
        raise Refused("bad_field:metadata")
    _check_once(metadata, template, *choices)
    shared = {name: request.get(name) for name in ("temperature", "top_p", "top_k", "seed")}
    shared |= {name: metadata.get(name) for name in METADATA}
    shared |= {
        "shaped": shaped_by(request, {}),
        "request_id": response.get("id"),
        "captured_at": response.get("created"),
        "thinking": template.get("enable_thinking"),
        "model": response.get("model") or request.get("model"),
        "asked_model": request.get("model"),
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
