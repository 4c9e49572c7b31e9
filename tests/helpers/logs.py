"""Log lines, and what becomes of them."""

import hashlib
import json
from typing import Any

from store import log_formats
from store.log_formats import NotUsed, Reject, Rules, parse_log
from store.rejection_reasons import REASONS

RULES = Rules(
    target_id="t",
    vocab_size=100,
    default_domain="default",
    min_output_tokens=2,
    val_percent=10,
    test_percent=10,
)
CAPTURE = {
    "v": 1,
    "captured_at": "2026-01-02T03:04:05.678901Z",
    "request_id": "r1",
    "endpoint": "/v1/chat/completions",
    "model": "m",
    "choice": 0,
    "prompt_ids": [1, 2, 3],
    "output_ids": [4, 5],
    "finish_reason": "stop",
    "temperature": 0,
    "top_k": -1,
    "conversation_id": "c1",
    "domain": "sql",
    "consent": True,
    "language": "de",
}


def line(**changes):
    return json.dumps(CAPTURE | changes).encode() + b"\n"


def parse(path, data, rules=RULES) -> list[Any]:
    path.write_bytes(data)
    return list(parse_log(path, len(data), hashlib.sha256(data).hexdigest(), rules))


def reason(path, data):
    """The reason of the only outcome. Also checks that its class is that of
    store/rejection_reasons.py, and that only a damaged record is kept.
    """
    (outcome,) = parse(path, data)
    damaged = REASONS[outcome.reason.partition(":")[0]].damaged
    assert isinstance(outcome, Reject if damaged else NotUsed), outcome
    if isinstance(outcome, Reject):
        assert outcome.raw == data[: log_formats.MAX_REJECT_BYTES]
    return outcome.reason


def pair(request=None, response=None, **more) -> bytes:
    answer = {"prompt_token_ids": [1], "choices": [{"finish_reason": "stop", "token_ids": [3, 4]}]}
    record = {"request": request or {}, "response": answer | (response or {})} | more
    return json.dumps(record).encode() + b"\n"
