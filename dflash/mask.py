"""The one attention mask of a DFlash block, as a rule, a dense tensor and a flex block mask.

Keys of a sequence are laid out as [context ; blocks]: T feature positions, then N blocks of S
slots. A query slot sees the features strictly before its block's anchor and its own block in
both directions; never a feature at or after the anchor, never another block (paper, section 3).
"""

from typing import Any

from torch import Tensor, arange
from torch.nn.attention.flex_attention import create_block_mask


def visible(anchors: Tensor, batch: Any, query: Any, key: Any, num_context: int, slots: int) -> Any:
    """Whether `query` attends to `key`; works on ints and on index tensors.

    anchors [B, N] int64: absolute position of each block's anchor. Example: anchor 3, T=5, S=2:
    query 0 sees keys 0, 1, 2 (features before 3) and 5, 6 (its block).
    """
    block = query // slots
    before_anchor = (key < num_context) & (key < anchors[batch, block])
    same_block = (key >= num_context) & ((key - num_context) // slots == block)
    return before_anchor | same_block


def dense_mask(anchors: Tensor, num_context: int, slots: int) -> Tensor:
    """Bool [B, 1, N*S, T+N*S], True where attention is allowed (for SDPA)."""
    num_queries = anchors.shape[1] * slots
    device = anchors.device
    batch = arange(anchors.shape[0], device=device)[:, None, None]
    query = arange(num_queries, device=device)[None, :, None]
    key = arange(num_context + num_queries, device=device)[None, None, :]
    return visible(anchors, batch, query, key, num_context, slots)[:, None]


def flex_mask(anchors: Tensor, num_context: int, slots: int) -> Any:
    """The same rule as a flex-attention BlockMask (CUDA; no backward on CPU)."""
    num_queries = anchors.shape[1] * slots

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(anchors, batch, query, key, num_context, slots)

    return create_block_mask(
        rule, anchors.shape[0], None, num_queries, num_context + num_queries, str(anchors.device)
    )
