"""Muon for matrices beside AdamW for vectors and tables, and the learning-rate schedule.

torch.optim.Muon always orthogonalises in bfloat16. A CPU without bfloat16 units emulates that,
several times slower than float32. The Muon here takes the dtype; otherwise its update is the same.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer

from dflash.path_selector import CODEBOOKS

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
BLOCK_ROWS = 192


def orthogonalise(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Push the singular values of `matrix` [M, N] towards 1 by Newton-Schulz (Jordan 2024).

    The short side is cut into blocks that are orthogonalised separately. The more blocks, the
    smaller their Gram matrices and the cost, and a step stays as good (docs/decisions/006).
    """
    tall = matrix.shape[0] > matrix.shape[1]
    short_first = matrix.T if tall else matrix
    x = short_first.to(dtype).reshape(num_blocks(len(short_first)), -1, short_first.shape[1])
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    iterate = newton_schulz_gram if dtype == torch.float32 else newton_schulz
    x = iterate(x, steps).reshape(short_first.shape)
    return x.T if tall else x


def newton_schulz(x_PRN: Tensor, steps: int) -> Tensor:
    """`steps` times x <- (a + b G + c G^2) x with G = x x^T, for each of P matrices."""
    a, b, c = NEWTON_SCHULZ
    x = x_PRN
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def newton_schulz_gram(x_PRN: Tensor, steps: int) -> Tensor:
    """The same in float32 with two products over N instead of two in every step.

    Every factor p = a + b G + c G^2 is a polynomial of the first G, so factors commute: the next G
    is p G p, and x is multiplied once, by their product. G holds squares, so it needs float32: in
    bfloat16 its rounding is as large as most of its eigenvalues, and the iteration amplifies it.
    """
    a, b, c = NEWTON_SCHULZ
    gram = x_PRN @ x_PRN.mT
    product = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram)
    for step in range(steps):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        product = factor @ product if step else factor
        if step + 1 < steps:
            gram = factor @ gram @ factor
    return product @ x_PRN


def whole(function: Callable[..., Tensor], matrix: Tensor, *args: object) -> Tensor:
    """`function` of a matrix that may be sharded over ranks (FSDP2). Every rank computes it from
    the full matrix and keeps its own part of the result.
    """
    if not isinstance(matrix, DTensor):
        return function(matrix, *args)
    result = function(matrix.full_tensor(), *args)
    mesh, placements = matrix.device_mesh, matrix.placements
    return distribute_tensor(result, mesh, placements, src_data_rank=None)


def num_blocks(rows: int) -> int:
    """The fewest equal parts of at most BLOCK_ROWS rows: 576 -> 3, 192 -> 1, a prime -> 1."""
    return next((n for n in range(1, rows) if rows % n == 0 and rows <= n * BLOCK_ROWS), 1)


class Muon(Optimizer):
    """Momentum, then an orthogonalised update times sqrt(max(1, rows / columns)); fp32 state."""

    def __init__(
        self, params, lr: float, momentum: float = 0.95, steps: int = 5, dtype=torch.float32
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "steps": steps})
        self.dtype = dtype  # not in the groups, so that checkpoints hold only numbers and tensors

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
                buffer.lerp_(param.grad, 1 - group["momentum"])
                look_ahead = param.grad.lerp(buffer, group["momentum"])
                update = whole(orthogonalise, look_ahead, group["steps"], self.dtype)
                scale = math.sqrt(max(1.0, param.shape[0] / param.shape[1]))
                param.add_(update.to(param.dtype), alpha=-group["lr"] * scale)


def build_optimizers(
    drafter: nn.Module, kind: str, lr: float, dtype: torch.dtype
) -> list[Optimizer]:
    """`muon`: matrices by Muon at lr, vectors by AdamW at lr / 2; `adamw`: all by AdamW.

    A selector's codebooks count as vectors: a step changes the rows of a few tokens, and
    orthogonalised it would change all of them. Each group has its `peak_lr`, which a schedule
    scales. Raises ValueError for another kind.
    """
    params = [p for p in drafter.parameters() if p.requires_grad]
    if kind == "adamw":
        return [_adamw(params, lr)]
    if kind != "muon":
        raise ValueError(f"train.optimizer {kind!r} is not one of muon, adamw")
    tables = {id(p) for name, p in drafter.named_parameters() if name.endswith(CODEBOOKS)}
    matrices = [p for p in params if p.ndim == 2 and id(p) not in tables]
    vectors = [p for p in params if p.ndim != 2 or id(p) in tables]
    muon = Muon([{"params": matrices, "peak_lr": lr}], lr=lr, dtype=dtype)
    return [muon, _adamw(vectors, lr / 2)]


def _adamw(params: list[nn.Parameter], lr: float) -> Optimizer:
    groups = [{"params": params, "peak_lr": lr}]
    return AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


@torch.no_grad()
def update_average(average: nn.Module, current: nn.Module, decay: float, step: int) -> None:
    """Exponential moving average of the trained weights: a += (1 - d) * (w - a) after `step` steps.

    Both modules have the same parameters, sharded alike. d = min(decay, (1 + step) / (10 + step)),
    so that early weights, which are far from the final ones, are forgotten even in a run that is
    shorter than the window of the average. Example: decay 0.99, step 1: d = 2 / 11.
    """
    d = min(decay, (1 + step) / (10 + step))
    for mean, value in zip(average.parameters(), current.parameters(), strict=True):
        if value.requires_grad:
            mean.lerp_(value, 1 - d)


def lr_scale(step: int, steps: int, warmup: float) -> float:
    """Linear warm-up over `warmup` of the steps, then cosine to zero; step counts from 0."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
