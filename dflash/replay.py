"""Replay: walk the draft/verify loop over a known greedy output with the drafter alone.

For greedy decoding the target's verdict is already in the recorded answer: a draft is accepted
exactly while it equals the recorded token. So one pass over the features gives the context, and
each round costs one drafter forward (facts/dflash.md section 3).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.model import ContextKV, Drafter, block_embeds


@dataclass(frozen=True)
class Request:
    """A recorded answer: ids [P + n] int64 of prompt and output, features [>= P + n - 1, F]."""

    ids: Tensor
    num_prompt: int
    features: Tensor

    @property
    def num_output(self) -> int:
        """Tokens of the answer."""
        return len(self.ids) - self.num_prompt


@torch.inference_mode()
def replay(
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    requests: Sequence[Request],
    num_drafts: int,
    batch_size: int = 16,
) -> list[list[int]]:
    """Accepted drafts of every round of every request, in the order of `requests`.

    `num_drafts` K in 1..block_size-1 as served (vLLM drafts K+1 slots, so the slots behind K do
    not exist, and drafts for different K differ). Requests of one token have no round.
    Raises ValueError for K out of range.
    """
    if not 1 <= num_drafts <= drafter.cfg.num_drafts:
        raise ValueError(
            f"k={num_drafts} is outside 1..{drafter.cfg.num_drafts} for a drafter of block size "
            f"{drafter.cfg.block_size}"
        )
    accepted: list[list[int]] = [[] for _ in requests]
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].ids))
    for start in range(0, len(order), batch_size):
        group = order[start : start + batch_size]
        walks = _walk(drafter, embedding, head, [requests[i] for i in group], num_drafts)
        for i, rounds in zip(group, walks, strict=True):
            accepted[i] = rounds
    return accepted


def _walk(
    drafter: Drafter, embedding: Tensor, head: Tensor, requests: Sequence[Request], num_drafts: int
) -> list[list[int]]:
    device = embedding.device
    context = drafter.context(_pad([r.features for r in requests]).to(embedding))
    ids = _pad([r.ids for r in requests]).to(device)
    anchors = torch.tensor([r.num_prompt for r in requests], device=device)
    ends = torch.tensor([len(r.ids) - 1 for r in requests], device=device)
    slots = torch.arange(1, num_drafts + 1, device=device)
    walks: list[list[int]] = [[] for _ in requests]
    active = (anchors < ends).nonzero().flatten()
    while len(active):
        live = _select(context, active, int(anchors[active].max()))
        here, row = anchors[active], ids[active]
        drafts = draft(
            drafter, embedding, head, live, row.gather(1, here[:, None]), here, num_drafts
        )
        where = (here[:, None] + slots).clamp(max=ids.shape[1] - 1)
        matched = (drafts == row.gather(1, where)).long().cumprod(1).sum(1)
        counts = torch.minimum(matched, ends[active] - here - 1)
        for i, count in zip(active.tolist(), counts.tolist(), strict=True):
            walks[i].append(count)
        anchors[active] += counts + 1
        active = active[anchors[active] < ends[active]]
    return walks


def draft(
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    context: ContextKV,
    anchor_tokens_B1: Tensor,
    anchors_B: Tensor,
    num_drafts: int,
) -> Tensor:
    """Greedy drafts [B, K] of one block per sequence, K+1 slots as vLLM lays them out."""
    embeds = block_embeds(embedding, anchor_tokens_B1, drafter.cfg.mask_token_id, num_drafts + 1)
    hidden = drafter(context, embeds, anchors_B[:, None])[:, 0, 1:]
    logits = hidden.reshape(-1, hidden.shape[-1]) @ head.T
    return logits.argmax(-1).view(len(anchors_B), num_drafts)


def _select(context: ContextKV, rows: Tensor, length: int) -> ContextKV:
    return [(key[rows, :, :length], value[rows, :, :length]) for key, value in context]


def _pad(tensors: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True)
