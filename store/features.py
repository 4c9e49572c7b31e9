"""One row of the feature cache: bf16 tensors as two byte planes, since Arrow has no bfloat16.

High bytes (sign, exponent) repeat and compress well; low bytes hardly do. Stored apart, zstd-1
needs 0.70 of the raw size, and they read faster than one mixed column.

Features are checked when they are read. A row carries two digests: of the token ids it was made
from, and of its feature bytes. The second is seeded with the sample's name and the first digest, so
features that were swapped between two samples are noticed too.
"""

import hashlib
import struct
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from store.ids import Ids, short_hash
from store.schemas import LAYOUT_VERSION

if TYPE_CHECKING:
    import torch


def cache_key(target_id: str, taps: list[int], dtype: str, top_k: int = 0) -> str:
    """Folder name of the features that one (target, taps, dtype, layout, top_k) gives."""
    parts = [target_id, list(taps), dtype, LAYOUT_VERSION]
    return short_hash([*parts, top_k] if top_k else parts)


def encode(features: "torch.Tensor") -> tuple[bytes, bytes]:
    """Split bf16 [T, D] into its (high, low) bytes, each T * D long. Bit exact.

    Raises ValueError for another dtype or number of dimensions.
    """
    import torch

    if features.dtype != torch.bfloat16 or features.dim() != 2:
        raise ValueError(
            f"features must be bfloat16 [T, D], got {features.dtype} {list(features.shape)}"
        )
    words = features.detach().cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
    return (words >> 8).astype(np.uint8).tobytes(), words.astype(np.uint8).tobytes()


def decode(hi: bytes, lo: bytes, n_tokens: int) -> "torch.Tensor":
    """The bf16 [n_tokens, D] tensor that `encode` split. Raises ValueError on wrong lengths.
    `hi` and `lo` may be any buffers, for instance Arrow's `scalar.asas_bytes()` (no copy).
    """
    import torch

    size = memoryview(hi).nbytes
    if n_tokens <= 0 or size != memoryview(lo).nbytes or size % n_tokens or size == 0:
        raise ValueError(
            f"planes of {size} and {memoryview(lo).nbytes} bytes do not hold {n_tokens} tokens"
        )
    words = np.frombuffer(hi, np.uint8).astype(np.uint16)
    words <<= 8
    words |= np.frombuffer(lo, np.uint8)
    return torch.from_numpy(words.view(np.int16)).reshape(n_tokens, -1).view(torch.bfloat16)


def ids_digest(ids: Ids) -> bytes:
    """16 bytes that name the token ids (prompt and output) of a sample."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).digest()[:16]


def features_row(sample_id: str, ids: Ids, features: "torch.Tensor") -> dict[str, Any]:
    """One FEATURES row of bf16 features [T, D] of these T token ids."""
    hi, lo = encode(features)
    names, made_from = {"sample_id": sample_id, "n_tokens": len(features)}, ids_digest(ids)
    digest = _digest(_seed(sample_id, len(features), made_from), hi, lo)
    return names | {"ids_digest": made_from, "hi": hi, "lo": lo, "digest": digest}


def top_row(row: Mapping[str, Any], ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any]:
    """The columns TOP of a FEATURES `row`. ids and logprobs are [n_output, top_k]; they are stored
    as int32 and float16.
    """
    ids, logprobs = ids.ravel().astype(np.int32), logprobs.ravel().astype(np.float16)
    seed = _seed(row["sample_id"], row["n_tokens"], row["ids_digest"])
    return {
        "top_ids": ids,
        "top_logprobs": logprobs,
        "top_digest": _digest(seed, ids, logprobs)[:4],
    }


def feature_fault(row: Mapping[str, Any], expected: bytes | None = None) -> str | None:
    """What is wrong with the features of a row; None if they are as they were written."""
    hi, lo, n_tokens = as_bytes(row["hi"]), as_bytes(row["lo"]), row["n_tokens"].as_py()
    made_from = row["ids_digest"].as_py()
    if expected not in (None, made_from):
        return "they were made from other token ids"
    seed = _seed(row["sample_id"].as_py(), n_tokens, made_from)
    if _digest(seed, hi, lo) != row["digest"].as_py():
        return "their bytes are not those that were written for this sample"
    return None if _finite(hi, lo) else "they are not finite"


def top_fault(row: Mapping[str, Any]) -> str | None:
    """What is wrong with the log-probabilities of a row; None if they are as they were written."""
    seed = _seed(row["sample_id"].as_py(), row["n_tokens"].as_py(), row["ids_digest"].as_py())
    found = _digest(seed, as_numpy(row["top_ids"]), as_numpy(row["top_logprobs"]))[:4]
    if found != row["top_digest"].as_py():
        return "their log-probabilities are not those that were written for this sample"
    return None


def _seed(sample_id: str, n_tokens: int, made_from: bytes) -> int:
    return zlib.crc32(made_from, zlib.crc32(f"{sample_id} {n_tokens}".encode()))


def _digest(seed: int, first: Any, second: Any) -> bytes:
    """Two chained CRC-32, the fastest digest of the standard library. It finds damage; it is no
    protection against an attack.
    """
    one = zlib.crc32(first, seed)
    return struct.pack("<II", zlib.crc32(second, one), one)


def _finite(hi: Any, lo: Any) -> bool:
    """Whether no bf16 is infinite or NaN. Those have all exponent bits set: seven in the high byte,
    one in the low byte.
    """
    high = np.frombuffer(hi, np.uint8) & 0x7F
    if high.max(initial=0) < 0x7F:
        return True
    return not bool((np.frombuffer(lo, np.uint8)[high == 0x7F] & 0x80).any())


def as_numpy(scalar: pa.Scalar) -> np.ndarray:
    """The values of a list scalar, not copied."""
    return scalar.values.to_numpy()  # pyright: ignore[reportAttributeAccessIssue]


def as_bytes(scalar: pa.Scalar) -> bytes:
    """A binary scalar as a buffer, not copied."""
    return scalar.as_buffer()  # pyright: ignore[reportAttributeAccessIssue]
