"""bf16 as byte planes: bit exact."""

import pytest
import torch

from store.features import cache_key, decode, encode


def every_bf16():
    """All 65,536 bit patterns, NaN payloads and denormals included: [256, 256]."""
    return (
        torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 256)
    )


def test_all_bit_patterns_survive():
    x = every_bf16()
    hi, lo = encode(x)
    assert len(hi) == len(lo) == x.numel()
    assert torch.equal(decode(hi, lo, 256).view(torch.uint16), x.view(torch.uint16))


def test_high_plane_holds_sign_and_exponent():
    hi, lo = encode(torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16))  # 0x3f80, 0xc000
    assert (hi, lo) == (b"\x3f\xc0", b"\x80\x00")


def test_strided_view_is_encoded_by_value():
    x = every_bf16()[:, ::3]
    assert torch.equal(
        decode(*encode(x), 256).view(torch.uint16), x.contiguous().view(torch.uint16)
    )


@pytest.mark.parametrize(
    "x", [torch.zeros(2, 3), torch.zeros(4, dtype=torch.bfloat16)], ids=["float32", "1-D"]
)
def test_wrong_tensor_is_refused(x):
    with pytest.raises(ValueError, match="bfloat16"):
        encode(x)


@pytest.mark.parametrize(("hi", "lo", "n"), [(b"ab", b"a", 1), (b"abc", b"abc", 2), (b"", b"", 0)])
def test_wrong_planes_are_refused(hi, lo, n):
    with pytest.raises(ValueError, match="do not hold"):
        decode(hi, lo, n)


def test_cache_key_depends_on_each_part():
    keys = {cache_key("t", [1, 2], "bfloat16"), cache_key("u", [1, 2], "bfloat16")}
    keys |= {cache_key("t", [1, 3], "bfloat16"), cache_key("t", [1, 2], "float32")}
    keys |= {cache_key("t", [1, 2], "bfloat16", 8), cache_key("t", [1, 2], "bfloat16", 16)}
    assert len(keys) == 6
    assert cache_key("t", [1, 2], "bfloat16") == cache_key("t", [1, 2], "bfloat16")
