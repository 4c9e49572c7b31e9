"""The one attention mask of a DFlash block, as a rule, a dense tensor and a flex block mask.

Keys of a sequence are laid out as [context ; blocks]: T feature positions, then N blocks of S
slots. A query slot sees the features strictly before its block's anchor and its own block in
both directions; never a feature at or after the anchor, never another block (paper, section 3).
A row may hold several documents one after another: a slot sees features of its own document only.

A causal drafter does not look at later slots. A sliding window of W lets a slot at position p see
positions above p - W, itself included, as vLLM 0.32 counts it (window - 1 to the left of each
query: v1/attention/backends/flash_attn.py, flex_attention.py, cpu_attn.py). To the right of a
query the backends disagree: the CPU's has no bound, the others stop at W - 1. DrafterConfig demands
W >= block size, where neither cuts anything inside a block.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, arange
from torch.nn.attention.flex_attention import create_block_mask


def visible(
    anchors: Tensor,
    batch: Any,
    query: Any,
    key: Any,
    num_context: int,
    slots: int,
    window: int = 0,
    causal: bool = False,
    starts: Tensor | None = None,
) -> Any:
    """Whether `query` attends to `key`; works on ints and on index tensors.

    anchors [B, N] int64: each block's anchor, a place in its row. window: 0 is unbounded. starts
    [B, N] int64: first place of each block's document (None: 0). Example: anchor 3, T=5, S=2. Query
    0 sees keys 0, 1, 2 (features before 3) and 5, 6 (its block). With window 2, query 0 sees
    feature 2, and query 1 (position 4) sees none. With start 1, query 0 sees keys 1, 2, 5, 6.
    """
    block, slot = query // slots, query % slots
    before_anchor = (key < num_context) & (key < anchors[batch, block])
    if starts is not None:
        before_anchor = before_anchor & (key >= starts[batch, block])
    same_block = (key >= num_context) & ((key - num_context) // slots == block)
    if window:
        before_anchor = before_anchor & (key > anchors[batch, block] + slot - window)
    if causal:
        same_block = same_block & ((key - num_context) % slots <= slot)
    return before_anchor | same_block


def dense_mask(
    anchors: Tensor,
    num_context: int,
    slots: int,
    window: int = 0,
    causal: bool = False,
    starts: Tensor | None = None,
) -> Tensor:
    """Bool [B, 1, N*S, T+N*S], True where attention is allowed (for SDPA)."""
    num_queries = anchors.shape[1] * slots
    device = anchors.device
    batch = arange(anchors.shape[0], device=device)[:, None, None]
    query = arange(num_queries, device=device)[None, :, None]
    key = arange(num_context + num_queries, device=device)[None, None, :]
    seen = visible(anchors, batch, query, key, num_context, slots, window, causal, starts)
    return seen[:, None]


def flex_mask(
    anchors: Tensor,
    num_context: int,
    slots: int,
    window: int = 0,
    causal: bool = False,
    starts: Tensor | None = None,
) -> Any:
    """The same rule as a flex-attention BlockMask (CUDA; no backward on CPU)."""
    num_queries = anchors.shape[1] * slots

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(anchors, batch, query, key, num_context, slots, window, causal, starts)

    make = fused_block_mask() if anchors.is_cuda else create_block_mask
    num_keys = num_context + num_queries
    return make(rule, anchors.shape[0], None, num_queries, num_keys, str(anchors.device))


@cache
def fused_block_mask() -> Any:
    """create_block_mask compiled to one kernel: the eager one fills the whole mask first. CUDA."""
    return torch.compile(create_block_mask)
