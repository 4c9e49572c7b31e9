"""One row of the feature cache: bf16 tensors, stored as store/feature_codec.py says.

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

from store.feature_codec import BFLOAT16, encode, is_finite
from store.ids import Ids, short_hash
from store.schemas import LAYOUT_VERSION

if TYPE_CHECKING:
    import torch


def cache_key(target_id: str, taps: list[int], dtype: str, top_k: int = 0) -> str:
    """Folder name of the features that one (target, taps, dtype, layout, top_k) gives."""
    parts = [target_id, list(taps), dtype, LAYOUT_VERSION]
    return short_hash([*parts, top_k] if top_k else parts)


def ids_digest(ids: Ids) -> bytes:
    """16 bytes that name the token ids (prompt and output) of a sample."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).digest()[:16]


def features_row(
    sample_id: str, ids: Ids, features: "torch.Tensor", dtype: str = BFLOAT16, num_taps: int = 1
) -> dict[str, Any]:
    """One FEATURES row of bf16 features [T, num_taps * hidden] of these T token ids, in one of
    store.feature_codec.DTYPES.
    """
    hi, lo = encode(features, dtype, num_taps)
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


def feature_fault(row: Mapping[str, Any], dtype: str, expected: bytes | None = None) -> str | None:
    """What is wrong with the features of a row; None if they are as they were written. expected:
    the `ids_digest` that it must have; None: any.
    """
    hi, lo, n_tokens = as_bytes(row["hi"]), as_bytes(row["lo"]), row["n_tokens"].as_py()
    made_from = row["ids_digest"].as_py()
    if expected not in (None, made_from):
        return "they were made from other token ids"
    seed = _seed(row["sample_id"].as_py(), n_tokens, made_from)
    if _digest(seed, hi, lo) != row["digest"].as_py():
        return "their bytes are not those that were written for this sample"
    return None if is_finite(hi, lo, dtype) else "they are not finite"


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


def as_numpy(scalar: pa.Scalar) -> np.ndarray:
    """The values of a list scalar, not copied."""
    return scalar.values.to_numpy()  # pyright: ignore[reportAttributeAccessIssue]


def as_bytes(scalar: pa.Scalar) -> bytes:
    """A binary scalar as a buffer, not copied."""
    return scalar.as_buffer()  # pyright: ignore[reportAttributeAccessIssue]
