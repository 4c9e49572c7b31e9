"""Features as bytes: bf16 bit for bit, fp8 within the rounding of e4m3, also at the limits."""

import pytest
import torch

from store.feature_codec import BFLOAT16, DTYPES, FLOAT8, decode, encode, is_finite
from store.feature_shards import find_faults, open_shard, write_shard
from store.features import features_row
from store.place import place_of
from store.schemas import features_schema
from tests.helpers.features import SHAPE, cache_of

TAPS, HIDDEN = 2, 16


def every_bf16():
    """All 65,536 bit patterns, NaN payloads and denormals included: [256, 256]."""
    return (
        torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 256)
    )


def bits(x):
    return x.contiguous().view(torch.uint16)


def stored(x, taps=TAPS):
    """What a reader gets of fp8 features."""
    return decode(*encode(x, FLOAT8, taps), len(x), FLOAT8)


def test_all_bit_patterns_survive_in_bf16():
    x = every_bf16()
    hi, lo = encode(x)
    assert len(hi) == len(lo) == x.numel()
    assert torch.equal(bits(decode(hi, lo, 256)), bits(x))


def test_high_plane_holds_sign_and_exponent():
    hi, lo = encode(torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16))  # 0x3f80, 0xc000
    assert (hi, lo) == (b"\x3f\xc0", b"\x80\x00")


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_strided_view_is_encoded_by_value(dtype):
    x = torch.randn(8, 96).bfloat16()[:, ::3]
    both = [decode(*encode(y, dtype, TAPS), 8, dtype) for y in (x, x.contiguous())]
    assert torch.equal(*both)


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize(
    "x", [torch.zeros(2, 4), torch.zeros(4, dtype=torch.bfloat16)], ids=["float32", "1-D"]
)
def test_wrong_tensor_is_refused(x, dtype):
    with pytest.raises(ValueError, match="must be bfloat16"):
        encode(x, dtype)


def test_a_width_that_is_not_that_of_the_taps_is_refused():
    with pytest.raises(ValueError, match="of 3 taps cannot be 32 wide"):
        encode(torch.zeros(2, 32).bfloat16(), FLOAT8, 3)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="'float16': known are bfloat16, float8_e4m3fn"):
        encode(torch.zeros(2, 4).bfloat16(), "float16")
    with pytest.raises(ValueError, match="'float16'"):
        decode(b"ab", b"ab", 1, "float16")


@pytest.mark.parametrize(
    ("hi", "lo", "n", "dtype"),
    [
        (b"ab", b"a", 1, BFLOAT16),
        (b"abc", b"abc", 2, BFLOAT16),
        (b"", b"", 0, BFLOAT16),
        (b"", b"", 1, FLOAT8),
        (b"ab", b"", 1, FLOAT8),
        (b"ab", b"abc", 1, FLOAT8),
        (b"ab", b"abcd", 2, FLOAT8),
        (b"abc", b"abcdefgh", 1, FLOAT8),  # two taps
    ],
)
def test_wrong_columns_are_refused(hi, lo, n, dtype):
    with pytest.raises(ValueError, match="do not hold"):
        decode(hi, lo, n, dtype)


def test_fp8_has_one_float32_scale_per_token_and_tap():
    hi, lo = encode(torch.randn(7, TAPS * HIDDEN).bfloat16(), FLOAT8, TAPS)
    assert (len(hi), len(lo)) == (7 * TAPS * HIDDEN, 7 * TAPS * 4)


def test_fp8_is_within_the_rounding_of_e4m3():
    """Relative to a value 1/16 (half of the last of four bits); near zero, absolute: half of the
    smallest number, 2^-10, times the scale.
    """
    x = torch.randn(64, TAPS * 128).bfloat16()
    x[:, 3] *= 1000  # as the outlier channels of real targets
    hi, lo = encode(x, FLOAT8, TAPS)
    scales = torch.frombuffer(bytearray(lo), dtype=torch.float32).view(64, TAPS, 1)
    error = (decode(hi, lo, 64, FLOAT8).double() - x.double()).abs().view(64, TAPS, -1)
    allowed = torch.maximum(x.double().abs().view(64, TAPS, -1) / 16, scales.double() / 1024)
    assert (error <= allowed).all()
    assert float(error.square().sum() / x.double().square().sum()) ** 0.5 < 0.04


def test_fp8_keeps_small_values_beside_an_outlier():
    """One scale serves a channel of 20,000 and all others near 1."""
    x = torch.randn(32, TAPS * 576).bfloat16()
    x[:, 7] = 20_000
    others = torch.ones(TAPS * 576, dtype=torch.bool)
    others[7] = False
    error = (stored(x).double() - x.double())[:, others].norm() / x.double()[:, others].norm()
    assert error < 0.04


LIMITS = {
    "zero": 0.0,
    "one": 1.0,
    "huge": 1e30,
    "largest bf16": torch.finfo(torch.bfloat16).max,
    "small": 1e-30,
    "smallest normal": torch.finfo(torch.bfloat16).tiny,
    "subnormal": 2.0**-130,
    "smallest bf16": 2.0**-133,
}


@pytest.mark.parametrize("name", LIMITS)
def test_fp8_at_the_limits_of_bf16(name):
    """Rows of one size, and such a value alone in a row of zeros."""
    value = torch.tensor(LIMITS[name]).bfloat16()
    x = torch.zeros(3, TAPS * HIDDEN).bfloat16()
    x[0], x[1, 3], x[2, 5] = value, value, -value
    hi, lo = encode(x, FLOAT8, TAPS)
    assert is_finite(hi, lo, FLOAT8)
    found = decode(hi, lo, 3, FLOAT8).double()
    assert found.isfinite().all()
    assert (found - x.double()).abs().max() <= float(value) / 16
    assert torch.equal(found == 0, x == 0)


def test_fp8_keeps_zero_rows_between_others():
    x = torch.randn(3, TAPS * HIDDEN).bfloat16()
    x[1] = 0
    assert torch.equal(stored(x)[1], x[1])
    assert stored(x)[2].abs().sum() > 0


def write(place, dtype, *rows):
    """A shard of these rows; (its rows of the index, its faults)."""
    index = write_shard(place, features_schema(*SHAPE, dtype), rows)
    name = index["file"][0].as_py()
    return index, find_faults(place, name, open_shard(place, name, features_schema(*SHAPE)))


def row_of(name, x, dtype=FLOAT8):
    return features_row(name, range(len(x)), x, dtype, TAPS)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_fp8_that_was_written_as_nan_or_infinity_is_refused(tmp_path, value):
    place, x = place_of(str(tmp_path)), torch.randn(3, TAPS * HIDDEN).bfloat16()
    x[1, 2] = value
    index, faults = write(place, FLOAT8, row_of("s", x), row_of("t", x))
    assert faults == dict.fromkeys("st", "they are not finite")
    with pytest.raises(ValueError, match=r"sample s.*not finite"):
        cache_of(place, index)["s"]


@pytest.mark.parametrize("byte", [b"\x7f", b"\xff"])
def test_fp8_bytes_that_mean_nan_are_not_finite(byte):
    hi, lo = encode(torch.randn(3, TAPS * HIDDEN).bfloat16(), FLOAT8, TAPS)
    assert is_finite(hi, lo, FLOAT8)
    assert not is_finite(byte + hi[1:], lo, FLOAT8)
    assert not is_finite(hi, b"\x00\x00\x80\x7f" + lo[4:], FLOAT8), "an infinite scale"


def test_damaged_fp8_is_named(tmp_path):
    place = place_of(str(tmp_path))
    rows = [row_of(name, torch.randn(3, TAPS * HIDDEN).bfloat16()) for name in "ab"]
    rows[0] |= {"lo": rows[1]["lo"][::-1]}
    index, faults = write(place, FLOAT8, *rows)
    assert list(faults) == ["a"]
    with pytest.raises(ValueError, match=r"sample a.*bytes.*flywheel harvest"):
        cache_of(place, index)["a"]


def test_readers_take_the_dtype_that_a_shard_names(tmp_path):
    place, x = place_of(str(tmp_path)), torch.randn(7, TAPS * HIDDEN).bfloat16()
    for dtype, wanted in ((BFLOAT16, x), (FLOAT8, stored(x))):
        index, faults = write(place, dtype, row_of("s", x, dtype), row_of("t", x, dtype))
        found = cache_of(place, index)["t"]
        assert torch.equal(found, wanted)
        assert (found.dtype, faults) == (torch.bfloat16, {})


def test_a_shard_of_an_unknown_dtype_is_refused(tmp_path):
    place, x = place_of(str(tmp_path)), torch.ones(2, TAPS * HIDDEN).bfloat16()
    with pytest.raises(ValueError, match="dtype is 'float16', expected 'bfloat16 or float8_e4m3fn"):
        write(place, "float16", row_of("s", x, BFLOAT16))
