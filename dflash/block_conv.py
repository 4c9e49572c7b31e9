"""DFlash 2's convolution: each slot of a block mixes in the slots before it, around a sublayer.

Without it the slots of a block see one another through attention alone. Read in vLLM 0.32
(models/qwen3_dflash2.py) and z-lab's client; both agree. Shape suffixes as in dflash/model.py, and
C taps of the kernel, G groups of channels.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.drafter_config import DrafterConfig


class BlockConv(nn.Module):
    """Convolutions before and behind a sublayer, with kernels made from its input.

    The kernel of a slot is `base_kernel` (for each channel) plus a projection of the slot (for each
    group of channels). It starts as the identity: 1 for the slot itself, 0 for all else.
    """

    def __init__(self, cfg: DrafterConfig):
        super().__init__()
        self.taps, groups = cfg.conv_kernel_size, cfg.hidden_size // cfg.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, cfg.hidden_size))
        self.kernel_projection = nn.Linear(cfg.hidden_size, 2 * self.taps * groups, bias=False)

    def start(self) -> None:
        """Set the weights to the identity."""
        nn.init.zeros_(self.kernel_projection.weight)
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])

    def forward(self, x: Tensor, slots: int, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """X [B, N*S, H] in blocks of `slots` -> what stands behind the sublayer, of that shape."""
        blocks = x.unflatten(1, (-1, slots))
        kernels = self.kernel_projection(blocks).unflatten(-1, (2, self.taps, -1))
        before = convolve(blocks, self.base_kernel[0], kernels[..., 0, :, :])
        out = sublayer(before.flatten(1, 2)).unflatten(1, (-1, slots))
        return convolve(out, self.base_kernel[1], kernels[..., 1, :, :]).flatten(1, 2)


def convolve(x: Tensor, base_CH: Tensor, dynamic: Tensor) -> Tensor:
    """y[i] = sum over t of (base[t] + dynamic[i, t, group]) * x[i - t]; x before the block is 0.

    x [..., S, H], dynamic [..., S, C, G]. Summed in float32, as vLLM's kernel does.
    Example: base [1, 0.5], dynamic 0, x = [2, 4]: y = [2, 4 + 0.5 * 2] = [2, 5].
    """
    groups = x.unflatten(-1, (dynamic.shape[-1], -1)).float()
    total = torch.zeros_like(groups)
    for tap in range(min(len(base_CH), x.shape[-2])):
        earlier = F.pad(groups[..., : x.shape[-2] - tap, :, :], (0, 0, 0, 0, tap, 0))
        kernel = base_CH[tap].view(groups.shape[-2:]) + dynamic[..., tap, :, None].float()
        total = total + kernel * earlier
    return total.flatten(-2).to(x.dtype)
