"""A reduced draft vocabulary: only tokens that the traffic uses can be drafted.

A drafter has few layers, so most of the cost of a draft is the target's head. A token outside the
vocabulary is never drafted, so tau can only fall; the target still decides every token (FR-Spec,
arXiv 2502.14856). Stored as in EAGLE-3, which vLLM serves: `lm_head.weight` [D, H], rows of the
target's head, and `d2t` [D] int64; row i drafts token i + d2t[i].
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from dflash.model import Drafter


def frequent_tokens(answers: Iterable[Tensor], size: int, vocab_size: int) -> Tensor:
    """The `size` most frequent tokens of the answers, ids [size] ascending.

    Among equally frequent tokens, and those that never occur, the lowest ids are taken: tokenizers
    number their merges from the most common on.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in answers:
        counts.scatter_add_(0, ids, torch.ones_like(ids))
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def set_vocabulary(drafter: Drafter, head_VH: Tensor, ids: Tensor) -> None:
    """Let a drafter of a reduced vocabulary draft `ids` [draft_vocab_size], ascending; in place."""
    drafter.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
    drafter.lm_head.weight.copy_(head_VH[ids.to(head_VH.device)])
