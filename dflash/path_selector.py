"""DFlash 2's selector: of the likeliest tokens of each slot, the one that best follows its
predecessor.

A DFlash drafter fills all slots at once, so neighbours may not fit together ("of" and "of course"
give "of of"). The selector scores the top tokens of a slot once more, given the token before:

    S_t(p -> c) = U_t(c) + < A[p] * (W h_t), B[c] >

U: the drafter's logits, A and B: a row for each token, W: a matrix. Greedy drafting walks from the
anchor along the best scores. Read in vLLM 0.32 (spec_decode/dflash2) and z-lab's client.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.drafter_config import DrafterConfig

CODEBOOKS = ("predecessor_codebook", "successor_codebook")


class PathSelector(nn.Module):
    """A (`predecessor_codebook`), B (`successor_codebook`) and W (`hidden_projection`)."""

    def __init__(self, cfg: DrafterConfig):
        super().__init__()
        size = (cfg.vocab_size, cfg.selector_rank)
        self.top_k = cfg.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(size))
        self.successor_codebook = nn.Parameter(torch.zeros(size))
        self.hidden_projection = nn.Linear(cfg.hidden_size, cfg.selector_rank, bias=False)

    def start(self, draw: torch.Generator) -> None:
        """Random codebooks, and W = 0: the scores are the drafter's logits, bit for bit."""
        nn.init.zeros_(self.hidden_projection.weight)
        for name in CODEBOOKS:
            nn.init.normal_(getattr(self, name), std=0.02, generator=draw)

    def scores(self, hidden: Tensor, unary: Tensor, tokens: Tensor, previous: Tensor) -> Tensor:
        """S [..., C] of C candidate `tokens` [..., C] with logits `unary` [..., C].

        hidden [..., H]: of the slot; previous [...]: the token before it.
        """
        before = F.embedding(previous, self.predecessor_codebook)
        state = before * self.hidden_projection(hidden)
        after = F.embedding(tokens, self.successor_codebook)
        follows = torch.einsum("...r,...cr->...c", state, after)
        return unary + follows

    def rescored(self, hidden: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
        """Logits [..., V] of a slot -> S [..., V] after the token `previous` [...]; -inf for tokens
        that are not among the `top_k` likeliest: those are never drafted.
        """
        unary, tokens = logits.topk(self.top_k)
        scores = self.scores(hidden, unary, tokens, previous)
        return torch.full_like(logits, -torch.inf).scatter(-1, tokens, scores.to(logits.dtype))
