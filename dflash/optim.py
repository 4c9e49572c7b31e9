"""Muon for matrices beside AdamW for vectors, and the learning-rate schedule.

torch.optim.Muon orthogonalises in bfloat16 always, which a CPU without bfloat16 units emulates
several times slower than float32; this one takes the dtype. Same update otherwise.
"""

import math

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
BLOCK_ROWS = 192


def orthogonalise(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Push the singular values of `matrix` [M, N] towards 1 by Newton-Schulz (Jordan 2024).

    The short side is cut into blocks that are treated apart: cost falls with their number, since
    a Gram matrix is squared, and a step stays as good (docs/decisions/006).
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
    is p G p, and x is multiplied once, by their product. A G of squares needs the digits: in
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


def num_blocks(rows: int) -> int:
    """The fewest equal parts of at most BLOCK_ROWS rows: 576 -> 3, 192 -> 1, a prime -> 1."""
    return next((n for n in range(1, rows) if rows % n == 0 and rows <= n * BLOCK_ROWS), 1)


class Muon(Optimizer):
    """Momentum, then an orthogonalised update times sqrt(max(1, rows / columns)); fp32 state."""

    def __init__(
        self, params, lr: float, momentum: float = 0.95, steps: int = 5, dtype=torch.float32
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "steps": steps, "dtype": dtype})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
                buffer.lerp_(param.grad, 1 - group["momentum"])
                look_ahead = param.grad.lerp(buffer, group["momentum"])
                update = orthogonalise(look_ahead, group["steps"], group["dtype"])
                scale = math.sqrt(max(1.0, param.shape[0] / param.shape[1]))
                param.add_(update.to(param.dtype), alpha=-group["lr"] * scale)


def build_optimizers(
    drafter: nn.Module, kind: str, lr: float, dtype: torch.dtype
) -> list[Optimizer]:
    """`muon`: matrices by Muon at lr, vectors by AdamW at lr / 2; `adamw`: all by AdamW."""
    params = [p for p in drafter.parameters() if p.requires_grad]
    if kind == "adamw":
        return [AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]
    if kind != "muon":
        raise ValueError(f"train.optimizer {kind!r} is not one of muon, adamw")
    matrices = [p for p in params if p.ndim == 2]
    vectors = [p for p in params if p.ndim != 2]
    adamw = AdamW(vectors, lr=lr / 2, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, lr=lr, dtype=dtype), adamw]


def lr_scale(step: int, steps: int, warmup: float) -> float:
    """Linear warm-up over `warmup` of the steps, then cosine to zero; step counts from 0."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
