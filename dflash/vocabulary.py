"""A reduced draft vocabulary: only tokens that the traffic uses can be drafted.

Beside a few layers the target's head is most of what a draft costs. What is not in the vocabulary
is never accepted, so tau can only fall; the target still decides every token (FR-Spec, arXiv
2502.14856). Stored as EAGLE-3 does and vLLM serves it: `lm_head.weight` [D, H], rows of the
target's head, and `d2t` [D] int64, row i drafts token i + d2t[i].
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from dflash.model import Drafter


def frequent_tokens(answers: Iterable[Tensor], size: int, vocab_size: int) -> Tensor:
    """The `size` most frequent tokens of the answers, ids [size] ascending.

    Equally frequent ones, and those that never occur, by the lowest id: tokenizers number their
    merges from the commonest on.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in answers:
        counts += ids.bincount(minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def set_vocabulary(drafter: Drafter, head_VH: Tensor, ids: Tensor) -> None:
    """Let a drafter of a reduced vocabulary draft `ids` [draft_vocab_size], ascending; in place."""
    drafter.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
    drafter.lm_head.weight.copy_(head_VH[ids.to(head_VH.device)])
