"""A new drafter: random, or with every tensor that fits copied from the target."""

import os

import torch
from torch import Tensor

from dflash.config import DrafterConfig
from dflash.model import Drafter
from dflash.target import open_tensors


def random_drafter(cfg: DrafterConfig, seed: int) -> Drafter:
    """Normal(0, 0.02) matrices, unit norms."""
    torch.manual_seed(seed)
    drafter = Drafter(cfg)
    for param in drafter.parameters():
        if param.ndim == 2:
            torch.nn.init.normal_(param, std=0.02)
    return drafter


def target_drafter(cfg: DrafterConfig, target_folder: str | os.PathLike, seed: int) -> Drafter:
    """Start from the target's own last layers.

    Drafter layer i starts as target layer L - n + i; `fc` passes the deepest tap through and
    `hidden_norm` is that layer's input norm, so that the first drafter layer reads the context
    with keys and values the target itself would use. The final norm is the target's.
    Tensors without a counterpart stay random.
    """
    drafter = random_drafter(cfg, seed)
    read = open_tensors(target_folder)
    first = cfg.num_target_layers - cfg.num_hidden_layers
    state = drafter.state_dict()
    for name, tensor in state.items():
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            _copy(tensor, read(f"model.layers.{first + int(layer)}.{rest}"))
    _copy(state["norm.weight"], read("model.norm.weight"))
    _copy(state["hidden_norm.weight"], read(f"model.layers.{first}.input_layernorm.weight"))
    with torch.no_grad():
        drafter.fc.weight[:, -cfg.hidden_size :] += torch.eye(cfg.hidden_size)
    return drafter


def _copy(into: Tensor, source: Tensor | None) -> None:
    if source is not None and source.shape == into.shape:
        into.copy_(source)
