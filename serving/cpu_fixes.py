"""Two faults of vLLM 0.32 on CPUs, worked around by a plugin of the group `vllm.general_plugins`.

Key norm: `ops.rms_norm` with a [layers, head_dim] weight must use one row per layer; the CPU kernel
uses row 0 for all. A DFlash drafter of two or more layers then sees wrong context keys. The text
stays right, but acceptance drops without any message. (CUDA had this fault until vLLM #46761.)

Expansion: the CPU override of the rejection sampler's `expand_kernel` writes into a temporary int64
copy, so temperature, top-k and top-p of every batch that is not all greedy are uninitialised
memory: with any speculative method, the greedy answers of that batch are wrong too (vLLM #55005).

`register` is the entry point; vLLM calls it in each of its processes, before it reads the kernel
overrides. `check` tests both on the running vLLM and names the faults that it finds; serving.worker
refuses to load a drafter while there is one.
"""

from typing import Any

import torch

FAULTS = {
    "key_norm": "the drafter's context keys are normalised with the weights of its first layer",
    "expansion": "sampling parameters of mixed batches are uninitialised memory",
}


def register() -> None:
    """Replace the two functions if vLLM runs on a CPU; a second call changes nothing.

    Raises AttributeError when vLLM no longer has them: its processes then stop at start-up.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm import _custom_ops as ops
    from vllm.utils import cpu_triton_utils

    if not isinstance(ops.rms_norm, _RowwiseRmsNorm):
        ops.rms_norm = _RowwiseRmsNorm(ops.rms_norm)
    assert callable(cpu_triton_utils._expand_kernel_impl)
    cpu_triton_utils._expand_kernel_impl = expand


class _RowwiseRmsNorm:
    """`ops.rms_norm` that also takes a weight with one row per entry of the first dimension."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(
        self,
        out: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
    ) -> None:
        if weight is None or weight.dim() == 1:
            self.original(out, input, weight, epsilon)
        else:
            out.copy_(rowwise_rms_norm(input, weight, epsilon))


def rowwise_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMS norm over the last dimension, computed in float32, returned in x's dtype.

    x is [layers, ..., dim], weight [layers, dim]: layer i is scaled by weight[i].
    """
    x32 = x.float()
    inverse = (x32.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    gain = weight.float().view(weight.shape[0], *[1] * (x.dim() - 2), weight.shape[-1])
    return (x32 * inverse * gain).to(x.dtype)


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write input_val[i] to the cu_num_tokens[i] - cu_num_tokens[i-1] places of request i.

    Values [a, b] with cu_num_tokens [2, 5] fill output as [a, a, b, b, b], and every value equal
    to replace_from becomes replace_to. Names and order are those of the kernel this replaces.
    """
    ends = cu_num_tokens.long()
    counts = ends.diff(prepend=ends.new_zeros(1))
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    output.copy_(values.repeat_interleave(counts))


def check() -> list[str]:
    """Names of the FAULTS that this process's vLLM has, found by running its own code; [] if none.

    On a CPU it imports the drafter's model class (a few seconds the first time); elsewhere the
    faults do not exist and nothing is computed.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return []
    right = {"key_norm": _key_norm_is_right(), "expansion": _expansion_is_right()}
    return [name for name in FAULTS if not right[name]]


def require() -> None:
    """Raise RuntimeError if a fault is present: serving a drafter would be silently wrong."""
    faults = check()
    if faults:
        named = "; ".join(f"{name}: {FAULTS[name]}" for name in faults)
        raise RuntimeError(
            f"vLLM on this CPU would serve a drafter wrongly ({named}). The plugin "
            "dflash_cpu_fixes is not active: install this package in vLLM's environment "
            "(pip install --no-deps -e .), and leave VLLM_PLUGINS unset or name it there"
        )


def _key_norm_is_right() -> bool:
    """Send two layers with different weights through DFlash's own context-key norm."""
    from types import SimpleNamespace

    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    keys = torch.linspace(-2, 3, 2 * 3 * 1 * 32).view(2, 3, 1, 32).contiguous()
    weights = torch.stack([torch.linspace(0.5, 1.5, 32), torch.linspace(3.0, 1.0, 32)])
    drafter: Any = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-6)
    normed = DFlashQwen3Model._normalize_context_k(drafter, keys)
    return torch.allclose(normed, rowwise_rms_norm(keys, weights, 1e-6), atol=1e-5)


def _expansion_is_right() -> bool:
    """Send temperatures [0, 0.5, 2] through the rejection sampler's own launch of the kernel."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON, dispatcher
    from vllm.v1.sample import rejection_sampler

    name = f"{rejection_sampler.__name__}.expand_kernel"
    if not HAS_TRITON and name not in dispatcher._registry:
        current_platform.register_triton_kernel_overrides()
    output = torch.full((6,), float("nan"))
    values, ends = torch.tensor([0.0, 0.5, 2.0]), torch.tensor([1, 3, 6], dtype=torch.int32)
    rejection_sampler._expand(output, values, ends, 0, 1)
    return output.tolist() == [1.0, 0.5, 0.5, 2.0, 2.0, 2.0]
