"""DFlash 2's selector: of the likeliest tokens of each slot, the one that best follows its
predecessor.

A DFlash drafter fills all slots at once, so neighbours may not fit together ("of" and "of course"
give "of of"). The selector scores the top tokens of a slot once more, given the token before:

    S_t(p -> c) = U_t(c) + < A[p] * (W h_t), B[c] >

U: the drafter's logits, A and B: a row for each token, W: a matrix. Greedy drafting walks from the
anchor along the best scores. Read in vLLM 0.32 (spec_decode/dflash2) and z-lab's client.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

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
        state = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        follows = torch.einsum("...r,...cr->...c", state, self.successor_codebook[tokens])
        return unary + follows

    def best(self, hidden: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
        """The tokens [...] that are drafted after the tokens `previous` [...]; logits [..., V]."""
        unary, tokens = logits.topk(self.top_k)
        chosen = self.scores(hidden, unary, tokens, previous).argmax(-1, keepdim=True)
        return tokens.gather(-1, chosen)[..., 0]

    def walk(
        self,
        hidden_KH: Tensor,
        logits_KV: Tensor,
        anchor_token: int,
        choose: Callable[[Tensor], tuple[int, Tensor]],
    ) -> tuple[list[int], Tensor]:
        """The drafts of a block, each chosen after the one before, and their distributions [K, V].

        choose: from scores [C] to an index in them and the distribution [C] it was chosen by.
        """
        unary, tokens = logits_KV.topk(self.top_k)
        drafts, q_KV, previous = [], torch.zeros_like(logits_KV, dtype=torch.float32), anchor_token
        for hidden, logits, known, q in zip(hidden_KH, unary, tokens, q_KV, strict=True):
            before = torch.tensor(previous, device=hidden.device)
            index, chances = choose(self.scores(hidden, logits, known, before))
            q[known] = chances.to(q)
            previous = int(known[index])
            drafts.append(previous)
        return drafts, q_KV
