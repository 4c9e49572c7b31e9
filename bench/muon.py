"""make bench-muon: one optimizer step of our blockwise Muon against torch.optim.Muon.

It steps the demo drafter's matrices (2 layers, hidden 576). Ours orthogonalises blocks of rows in
the compute dtype of this machine; torch orthogonalises whole matrices in bfloat16.
"""

import torch

from bench.harness import paired, report
from dflash.optim import BLOCK_ROWS, Muon
from dflash.target_model import resolve_dtype

SHAPES = [(576, 2880)] + 2 * (
    2 * [(576, 576)] + 2 * [(192, 576)] + 2 * [(1536, 576)] + [(576, 1536)]
)


def main() -> None:
    """Compare and print the JSON line."""
    torch.manual_seed(0)
    grads = [torch.randn(shape) for shape in SHAPES]

    def params() -> list[torch.nn.Parameter]:
        made = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in SHAPES]
        for param, grad in zip(made, grads, strict=True):
            param.grad = grad.clone()
        return made

    dtype = resolve_dtype("auto")
    ours = Muon(params(), lr=0.02, dtype=dtype)
    theirs = torch.optim.Muon(params(), lr=0.02, weight_decay=0.0)
    ratios = paired(ours.step, theirs.step, repeats=3)
    detail = {"dtype": str(dtype), "block_rows": BLOCK_ROWS, "threads": torch.get_num_threads()}
    report("muon", ratios, "s torch.optim.Muon / s ours", detail)


if __name__ == "__main__":
    main()
