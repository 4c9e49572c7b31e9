"""Features as bytes: the columns `hi` and `lo` of a shard, in one of two dtypes.

bfloat16, exact: `hi` has the high bytes, `lo` the low bytes, since Arrow has no bfloat16. High
bytes (sign, exponent) repeat and compress well; low bytes hardly do. Stored apart, zstd-1 needs
0.70 of the raw size.

float8_e4m3fn, rounded: `hi` has one byte a value, `lo` one float32 scale per token and tap. A scale
is a power of two, so that a value times its scale is a bfloat16 without a second rounding. It is so
large that no value overflows, and at least SHRINK times the typical magnitude. Numbers below 2^-6
have fewer bits of mantissa in e4m3. So the second rule saves bits, which do not compress, where
they matter least: near zero (docs/decisions/038).
"""

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    import torch

BFLOAT16 = "bfloat16"
FLOAT8 = "float8_e4m3fn"
DTYPES = {"bf16": BFLOAT16, "fp8": FLOAT8}
"""Values of the setting harvest.features -> dtype, as in a shard's metadata."""
SHRINK = 24.0
LARGEST = 448.0
"""The largest e4m3 number."""
MOST = 1.875 * 2.0**127
"""The largest bfloat16 with a mantissa of e4m3. Larger ones would be rounded to infinity."""


def encode(
    features: "torch.Tensor", dtype: str = BFLOAT16, num_taps: int = 1
) -> tuple[bytes, bytes]:
    """The columns (hi, lo) of bf16 features [T, num_taps * hidden] in one of DTYPES.

    bfloat16 is exact; float8 is rounded to 1/16 of a value, or of 1/64 of its scale. What is not
    finite stays so. Raises ValueError for another dtype or shape.
    """
    import torch

    if features.dtype != torch.bfloat16 or features.dim() != 2:
        raise ValueError(
            f"features must be bfloat16 [T, D], got {features.dtype} {list(features.shape)}"
        )
    features = features.detach().cpu().contiguous()
    if dtype == FLOAT8:
        if features.shape[1] % num_taps:
            raise ValueError(f"features of {num_taps} taps cannot be {features.shape[1]} wide")
        return _encode_float8(features.view(len(features), num_taps, -1))
    _known(dtype)
    words = features.view(torch.int16).numpy().view(np.uint16)
    return (words >> 8).astype(np.uint8).tobytes(), words.astype(np.uint8).tobytes()


def decode(hi: bytes, lo: bytes, n_tokens: int, dtype: str = BFLOAT16) -> "torch.Tensor":
    """The bf16 tensor [n_tokens, num_taps * hidden] of columns that `encode` made.

    `hi` and `lo` may be any buffers, for instance Arrow's `scalar.as_buffer()` (no copy). Raises
    ValueError on wrong lengths.
    """
    import torch

    high, low = np.frombuffer(hi, np.uint8), np.frombuffer(lo, np.uint8)
    if not _fits(high.size, low.size, n_tokens, dtype):
        raise ValueError(
            f"{high.size} and {low.size} bytes do not hold {n_tokens} tokens of {dtype}"
        )
    # Arrow's allocator hands out memory that was used before. New pages of the system would cost
    # more time than filling them.
    words = np.frombuffer(pa.allocate_buffer(2 * high.size), np.uint16)
    if dtype == FLOAT8:
        np.take(_table(), high, out=words, mode="clip")
    else:
        words[:] = high
        words <<= 8
        words |= low
    features = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
    if dtype == FLOAT8:
        scales = torch.from_numpy(low.view("<f4").reshape(n_tokens, -1, 1).copy())
        features.view(*scales.shape[:2], -1).mul_(scales.bfloat16())
    return features.view(n_tokens, -1)


def is_finite(hi: bytes, lo: bytes, dtype: str = BFLOAT16) -> bool:
    """Whether no value of the columns is infinite or NaN.

    A bf16 of that kind has all exponent bits set: seven in the high byte, one in the low byte. An
    e4m3 NaN has all bits but the sign set, and there is no infinity.
    """
    high = np.frombuffer(hi, np.uint8) & 0x7F
    if dtype == FLOAT8 and not np.isfinite(np.frombuffer(lo, "<f4")).all():
        return False
    if high.max(initial=0) < 0x7F:
        return True
    return dtype != FLOAT8 and not (np.frombuffer(lo, np.uint8)[high == 0x7F] & 0x80).any()


def _encode_float8(x_TNH: "torch.Tensor") -> tuple[bytes, bytes]:
    import torch

    scales = _scales(x_TNH)
    x_TNH = x_TNH.clamp(-MOST, MOST) / scales.bfloat16()[..., None]
    values = x_TNH.to(torch.float8_e4m3fn).view(torch.uint8)
    return values.numpy().tobytes(), scales.numpy().astype("<f4").tobytes()


def _scales(x_TNH: "torch.Tensor") -> "torch.Tensor":
    """float32 [T, N]: powers of two; infinite or NaN where the features are.

    The typical magnitude is the square of the mean root. One channel of 20,000 beside 575 near 1,
    as in real targets, does not even double it. The mean would grow by a factor of 40.
    """
    import torch

    size = x_TNH.abs()
    most, root = size.amax(-1).double(), size.sqrt().mean(-1, dtype=torch.float32).double()
    wanted = torch.maximum(most / LARGEST, root.square() * SHRINK)
    exponent = torch.frexp(wanted).exponent.clamp(-126, 127)
    scales = torch.ldexp(torch.ones_like(wanted), exponent)
    return torch.where(most.isfinite(), scales, most).float()


@cache
def _table() -> np.ndarray:
    """The bf16 bits of each e4m3 byte: uint16 [256]."""
    import torch

    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).bfloat16()
    return values.view(torch.int16).numpy().view(np.uint16)


def _fits(high: int, low: int, n_tokens: int, dtype: str) -> bool:
    _known(dtype)
    if n_tokens <= 0 or high == 0 or high % n_tokens:
        return False
    if dtype == BFLOAT16:
        return low == high
    return low > 0 and low % (4 * n_tokens) == 0 and high % (low // 4) == 0


def _known(dtype: Any) -> None:
    if dtype not in DTYPES.values():
        raise ValueError(f"features of dtype {dtype!r}: known are {', '.join(DTYPES.values())}")
