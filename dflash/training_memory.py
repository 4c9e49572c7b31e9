"""What a training step needs in memory, computed from the real model without allocating it."""

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from dflash.drafter_config import DrafterConfig
from dflash.frozen_head import ROWS_PER_CHUNK
from dflash.lora import add_lora
from dflash.model import Drafter
from dflash.optim import build_optimizers
from dflash.training_step import mixed_precision


def model_bytes(
    cfg: DrafterConfig,
    optimizer: str,
    ranks: int,
    lora_rank: int = 0,
    lora_targets: Sequence[str] = (),
) -> dict[str, int]:
    """Bytes of float32 weights, gradients and optimizer state on each of `ranks` shards."""
    with torch.device("meta"):
        drafter = Drafter(cfg)
    if lora_rank:
        add_lora(drafter, lora_rank, lora_targets, seed=0)
    params = [p for p in drafter.parameters() if p.requires_grad]
    for param in params:
        param.grad = torch.empty_like(param)
    built = build_optimizers(drafter, optimizer, 1.0, torch.float32)
    for one in built:
        one.step()
    weights = sum(t.nbytes for t in drafter.state_dict().values())
    states = [t for one in built for state in one.state.values() for t in state.values()]
    parts = {
        "weights": weights,
        "gradients": sum(p.nbytes for p in params),
        "optimizer": sum(t.nbytes for t in states),
    }
    return {name: size // ranks for name, size in parts.items()}


def activation_bytes(
    cfg: DrafterConfig, num_samples: int, num_tokens: int, num_anchors: int, dtype: torch.dtype
) -> int:
    """Bytes that autograd keeps between forward and backward of one forward.

    Counted by running the drafter on fake tensors: samples of `num_tokens` each, with
    `num_anchors` blocks each, in mixed precision of `dtype`.
    """
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    width = len(cfg.target_layer_ids) * cfg.hidden_size
    with FakeTensorMode(), mixed_precision(dtype):
        drafter = Drafter(cfg)
        features = torch.empty(num_samples, num_tokens, width, dtype=dtype)
        embeds = torch.empty(num_samples, num_anchors, cfg.block_size, cfg.hidden_size, dtype=dtype)
        anchors = torch.empty(num_samples, num_anchors, dtype=torch.int64)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            drafter(drafter.context(features), embeds, anchors)
        for param in drafter.parameters():
            kept.pop(param.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in kept.values())


def head_bytes(hidden_size: int, candidates: int, dtype: torch.dtype) -> int:
    """Bytes of the candidates' head rows and of two float32 copies of one chunk of their logits."""
    return candidates * (hidden_size * dtype.itemsize + 2 * ROWS_PER_CHUNK * 4)


def selector_bytes(cfg: DrafterConfig, slots: int) -> int:
    """Bytes of a selector's candidates in one forward: of each slot the successors' rows and their
    gradient, float32; 0 without a selector.
    """
    return 2 * 4 * slots * cfg.selector_top_k * cfg.selector_rank
