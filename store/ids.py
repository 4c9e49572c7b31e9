"""Identifiers that follow from content alone: samples, conversations and their split."""

import hashlib
import json
from collections.abc import Sequence

import numpy as np

Ids = Sequence[int] | np.ndarray


def _token_bytes(ids: Ids) -> bytes:
    return np.asarray(ids, "<i4").tobytes()


def short_hash(value: object) -> str:
    """16 hex digits of sha256 over the canonical JSON of `value`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sample_id(
    target_id: str, prompt_ids: Sequence[int] | np.ndarray, output_ids: Sequence[int] | np.ndarray
) -> str:
    """32 hex digits naming one training sample. Lengths are hashed, so a moved boundary between
    prompt and output gives another id.
    """
    digest = hashlib.sha256(target_id.encode())
    for ids in (prompt_ids, output_ids):
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(_token_bytes(ids))
    return digest.hexdigest()[:32]


def prompt_id(prompt_ids: Ids) -> str:
    """24 hex digits naming a prompt: equal for equal token ids, whatever was answered."""
    return hashlib.sha256(_token_bytes(prompt_ids)).hexdigest()[:24]


def prompt_conversation(prompt_ids: Ids) -> str:
    """Conversation id for a record that names none; store.groups joins those of one chat."""
    return PROMPT_LABEL + prompt_id(prompt_ids)


PROMPT_LABEL = "prompt-"
NOTHING = {"", "none", "null", "nil", "nan", "undefined", "unknown", "default", "n/a", "-", "0"}


def says_nothing(conversation_id: str | None) -> bool:
    """Whether a conversation label names no conversation: it is absent, made from the prompt, or a
    placeholder of a client without a value, such as "none" or "unknown".
    """
    label = (conversation_id or "").strip()
    return label.lower() in NOTHING or label.startswith(PROMPT_LABEL)


def drafter_version(drafter_sha256: str) -> str:
    """Name of a drafter in acceptance rows: it exists before any registry knows the drafter."""
    return drafter_sha256[:12]


def split_of(conversation_id: str, val_percent: float, test_percent: float) -> str:
    """`train`, `val` or `test` from the hash of the conversation: stable for ever, whatever else
    is in the dataset. Raises ValueError when the shares leave nothing to train on.
    """
    if val_percent < 0 or test_percent < 0 or val_percent + test_percent >= 100:
        raise ValueError(
            f"val_percent {val_percent} + test_percent {test_percent} must be >= 0 and below 100"
        )
    digest = hashlib.sha256(b"split:" + conversation_id.encode()).digest()
    bucket = int.from_bytes(digest[:8], "little") % 10_000
    if bucket < test_percent * 100:
        return "test"
    if bucket < (test_percent + val_percent) * 100:
        return "val"
    return "train"
