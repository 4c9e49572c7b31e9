"""The reference decoder: real draft/verify rounds with a Transformers target, greedy, one request.

Slow and plain on purpose: replay, vLLM and z-lab's client are all judged against it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash.model import ContextKV, Drafter
from dflash.replay import draft
from dflash.target import Taps, Target, backbone


@dataclass(frozen=True)
class Decoded:
    """Output ids, accepted drafts per round, and the smallest top-2 logit gap of each token."""

    output_ids: list[int]
    accepted: list[int]
    gaps: list[float]


@torch.inference_mode()
def decode(
    target: Target,
    prompt_ids: Sequence[int],
    max_tokens: int,
    eos_ids: Sequence[int] = (),
    drafter: Drafter | None = None,
    num_drafts: int = 0,
) -> Decoded:
    """Greedy decoding, with a drafter in rounds of `num_drafts`, without one token by token.

    Counts follow dflash.acceptance: cut at the end of text, first token from prefill.
    """
    state = _State(target, drafter)
    tokens, gaps = state.verify(list(prompt_ids), last_only=True)
    output, all_gaps, accepted = tokens, gaps, []
    while not _ended(output, max_tokens, eos_ids):
        drafts = state.propose(output[-1], num_drafts) if drafter is not None else []
        verdict, gaps = state.verify([output[-1], *drafts])
        matched = 0
        while matched < len(drafts) and drafts[matched] == verdict[matched]:
            matched += 1
        state.keep(matched + 1)
        emitted = _cut(verdict[: matched + 1], max_tokens - len(output), eos_ids)
        output = output + emitted
        all_gaps = all_gaps + gaps[: len(emitted)]
        accepted.append(len(emitted) - 1)
    return Decoded(output, accepted if drafter is not None else [], all_gaps)


class _State:
    """The target's cache and the drafter's context, both ending just before the anchor."""

    def __init__(self, target: Target, drafter: Drafter | None):
        self.target, self.drafter = target, drafter
        self.cache = DynamicCache(config=target.model.config)
        self.context: ContextKV = []
        self.features: Tensor | None = None
        self.length = 0

    def verify(self, ids: list[int], last_only: bool = False) -> tuple[list[int], list[float]]:
        """The target's greedy token after each id (or only the last), with top-2 logit gaps."""
        taps = self.drafter.cfg.target_layer_ids if self.drafter else ()
        with Taps(self.target.model, taps) as tapped:
            hidden = backbone(self.target.model)(
                input_ids=torch.tensor([ids]), past_key_values=self.cache, use_cache=True
            ).last_hidden_state[0]
        self.features = tapped.joined() if taps else None
        logits = self.target.logits(hidden[-1:] if last_only else hidden).float()
        top = logits.topk(2, dim=-1)
        if last_only:
            self.keep(len(ids))
        return top.indices[:, 0].tolist(), (top.values[:, 0] - top.values[:, 1]).tolist()

    def keep(self, count: int) -> None:
        """Keep the first `count` ids of the last verification, drop the rest from both caches."""
        if self.features is not None and self.drafter is not None:
            new = self.drafter.context(self.features[:, :count], start=self.length)
            old = self.context or [(k[:, :, :0], v[:, :, :0]) for k, v in new]
            self.context = [
                (torch.cat([k0, k1], 2), torch.cat([v0, v1], 2))
                for (k0, v0), (k1, v1) in zip(old, new, strict=True)
            ]
        self.length += count
        excess = self.cache.get_seq_length() - self.length
        if excess:
            self.cache.crop(-excess)

    def propose(self, anchor_token: int, num_drafts: int) -> list[int]:
        assert self.drafter is not None
        drafts = draft(
            self.drafter,
            self.target.embedding,
            self.target.head,
            self.context,
            torch.tensor([[anchor_token]]),
            torch.tensor([self.length]),
            num_drafts,
        )
        return drafts[0].tolist()


def _ended(output: list[int], max_tokens: int, eos_ids: Sequence[int]) -> bool:
    return len(output) >= max_tokens or output[-1] in eos_ids


def _cut(tokens: list[int], room: int, eos_ids: Sequence[int]) -> list[int]:
    for i, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: min(i + 1, room)]
    return tokens[:room]
