"""LoRA: train low-rank additions to frozen matrices, merged before a drafter leaves training.

W' = W + B A (Hu et al. 2021, with alpha = rank, so no further factor). Only training uses it:
`merged` gives back the plain tensors, so serving costs nothing extra.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.model import Drafter


class LoraLinear(nn.Linear):
    """x W^T + x A^T B^T with W frozen; the state of the linear layer it replaces, plus lora_a
    [rank, in] and lora_b [out, rank]. B starts at zero: nothing changes before the first step.
    """

    def __init__(self, base: nn.Linear, rank: int, draw: torch.Generator):
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight = nn.Parameter(base.weight.detach(), requires_grad=False)
        bound = base.in_features**-0.5
        start = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=draw)
        self.lora_a = nn.Parameter(start.to(base.weight))
        self.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


def add_lora(drafter: Drafter, rank: int, targets: Sequence[str], seed: int) -> Drafter:
    """Freeze `drafter` and add trainable factors to every matrix that `targets` names, in place.

    targets: last parts of module names, such as q_proj or fc. Raises ValueError if there is none,
    or for one that names no matrix.
    """
    drafter.requires_grad_(False)
    linear = [name for name, module in drafter.named_modules() if isinstance(module, nn.Linear)]
    last = [name.rpartition(".")[2] for name in linear]
    unknown = sorted(set(targets) - set(last))
    if unknown or not targets:
        raise ValueError(
            f"train.lora_targets: {', '.join(unknown) or 'nothing'} names no matrix of the "
            f"drafter; choose from {', '.join(dict.fromkeys(last))}"
        )
    draw = torch.Generator().manual_seed(seed)
    for name, kind in zip(linear, last, strict=True):
        if kind in targets:
            parent = drafter.get_submodule(name.rpartition(".")[0])
            setattr(parent, kind, LoraLinear(drafter.get_submodule(name), rank, draw))  # pyright: ignore[reportArgumentType]
    return drafter


@torch.no_grad()
def merged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a plain drafter: factors multiplied into their matrices.

    Where the product is zero the weight stays as it is, bit for bit (also -0.0). Without factors
    the tensors are those of `state`, not copies.
    """
    plain = {name: t for name, t in state.items() if not name.endswith((".lora_a", ".lora_b"))}
    for name in state:
        if name.endswith(".lora_a"):
            layer = name.removesuffix(".lora_a")
            weight, change = state[f"{layer}.weight"], state[f"{layer}.lora_b"] @ state[name]
            plain[f"{layer}.weight"] = torch.where(change == 0, weight, weight + change)
    return plain
