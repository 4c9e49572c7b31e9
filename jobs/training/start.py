"""What a training run begins with: its drafter, and the tokens that its loss must know."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash.batches import Labels, Sample
from dflash.checkpoint import load_drafter
from dflash.drafter_config import DrafterConfig
from dflash.lora import add_lora
from dflash.losses import named_tokens, recorded_token
from dflash.model import Drafter, in_head, new_drafter, reshaped
from jobs.base.config import Config
from jobs.base.target_facts import target_config


def start_drafter(cfg: Config, shape: DrafterConfig) -> Drafter:
    """What training starts from: train.base in `shape`, with low-rank factors if train.lora_rank is
    set, or a new drafter of `shape`. Only what is trained requires gradients.
    """
    train = cfg.train
    if train.base:
        layers = target_config(cfg)["num_hidden_layers"]
        drafter = reshaped(load_drafter(train.base, target_layers=layers), shape, train.seed)
    else:
        drafter = new_drafter(shape, train.seed)
    if train.lora_rank:
        return add_lora(drafter, train.lora_rank, train.lora_targets, train.seed)
    if train.part == "head":
        for name, param in drafter.named_parameters():
            param.requires_grad_(in_head(name))
    return drafter


def label_tokens(samples: Sequence[Sample], labels: Labels, shape: DrafterConfig) -> Tensor:
    """Tokens that may be labels, each once: int64 [M]. A selector's labels are recorded tokens,
    whatever those of the first loss are.
    """
    named = named_tokens(samples, labels)
    if not shape.is_dflash2 or labels is recorded_token:
        return named
    return torch.cat([named, named_tokens(samples, recorded_token)]).unique()
