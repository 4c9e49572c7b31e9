"""One drafter on several ranks: replicated (DDP) or sharded (FSDP2), and its whole state.

Gradients are sums over ranks in both, never means, because the loss is divided by a global count.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dflash.model import Drafter

WHOLE = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)


def shard(drafter: Drafter) -> None:
    """Shard the parameters over all ranks (FSDP2). Each layer is gathered when it is used.

    Needs an initialised process group. Optimizers are built afterwards, from the shards.
    """
    device = next(drafter.parameters()).device
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    # FSDP2 warns that in-place writes to an output would lose hooks; nothing here does that.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    for module in (*drafter.layers, drafter):
        fully_shard(module, mesh=mesh)
        register_fsdp_forward_method(module, "context")
        if module is drafter:
            register_fsdp_forward_method(module, "rival_scores")
        sharded = cast(FSDPModule, module)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum


def sum_gradients(params: Sequence[Tensor]) -> None:
    """Add up the gradients of replicated parameters over all ranks, in one collective."""
    flat = torch.cat([_grad(param).flatten() for param in params])
    distributed.all_reduce(flat)
    parts = flat.split([param.numel() for param in params])
    for param, part in zip(params, parts, strict=True):
        param.grad = part.view_as(param)


def clip_gradients(params: Sequence[Tensor], most: float) -> float:
    """Scale the gradients so that their norm over all parameters is at most `most` (0: no limit);
    returns the norm before.
    """
    norm = torch.nn.utils.clip_grad_norm_(params, most or math.inf)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def whole_weights(drafter: Drafter) -> dict[str, Tensor]:
    """The full weights on every rank; a collective if sharded. Copies only what is sharded."""
    return cast(dict[str, Tensor], get_model_state_dict(drafter, options=WHOLE))


def whole_state(drafter: Drafter, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Full weights and optimizer state on rank 0, as if it were alone; empty on the other ranks.

    A collective. Keys are parameter names, so any number of ranks, sharded or not, can load it.
    """
    return {
        "drafter": get_model_state_dict(drafter, options=ON_RANK_0),
        "optimizers": [get_optimizer_state_dict(drafter, o, options=ON_RANK_0) for o in optimizers],
    }


def load_whole_state(
    drafter: Drafter, optimizers: Sequence[Optimizer], state: dict[str, Any]
) -> None:
    """Load what `whole_state` gave on rank 0; every rank passes the same `state`."""
    set_model_state_dict(drafter, state["drafter"], options=WHOLE)
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        set_optimizer_state_dict(drafter, optimizer, saved, options=WHOLE)


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None, "every parameter takes part in every forward"
    return param.grad
