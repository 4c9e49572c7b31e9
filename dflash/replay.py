"""Replay: walk the draft/verify loop over a known greedy output with the drafter alone.

For greedy decoding the target's verdict is already in the recorded answer: a draft is accepted
exactly while it equals the recorded token. So one pass over the features gives the context, and
each round costs one drafter forward (facts/dflash.md section 3).
"""

from collections.abc import Callable, Iterator, Sequence
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
    batch_tokens: int = 16384,
) -> list[list[int]]:
    """Accepted drafts of every round of every request, in the order of `requests`.

    `num_drafts` K in 1..block_size-1 as served (vLLM drafts K+1 slots, so the slots behind K do
    not exist, and drafts for different K differ). Requests of one token have no round.
    Raises ValueError for K out of range.
    """
    return replay_many(drafter, embedding, head, requests, [num_drafts], batch_tokens)[num_drafts]


@torch.inference_mode()
def replay_many(
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    requests: Sequence[Request],
    ks: Sequence[int],
    batch_tokens: int = 16384,
    progress: Callable[[int], object] = lambda done: None,
) -> dict[int, list[list[int]]]:
    """`replay` for several K; the context of a request is projected once for all of them.

    batch_tokens: positions that are walked together, padding included. `progress` is told how many
    requests are done now and then.
    """
    for k in ks:
        if not 1 <= k <= drafter.cfg.num_drafts:
            raise ValueError(
                f"k={k} is outside 1..{drafter.cfg.num_drafts} for a drafter of block size "
                f"{drafter.cfg.block_size}"
            )
    walks: dict[int, list[list[int]]] = {k: [[] for _ in requests] for k in ks}
    for group in length_groups([len(request.ids) for request in requests], batch_tokens):
        batch = _Batch(drafter, embedding, head, [requests[i] for i in group])
        for k in ks:
            for i, rounds in zip(group, batch.walk(k), strict=True):
                walks[k][i] = rounds
        progress(len(group))
    return walks


def length_groups(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices in groups of similar length, each within batch_tokens or of one request."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if group and lengths[i] * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


class _Batch:
    """Requests that walk together, with the context of all their positions."""

    def __init__(
        self, drafter: Drafter, embedding: Tensor, head: Tensor, requests: Sequence[Request]
    ):
        self.drafter, self.embedding, self.head = drafter, embedding, head
        device = embedding.device
        self.context = drafter.context(_pad([r.features for r in requests]).to(embedding))
        self.ids = _pad([r.ids for r in requests]).to(device)
        self.starts = torch.tensor([r.num_prompt for r in requests], device=device)
        self.ends = torch.tensor([len(r.ids) - 1 for r in requests], device=device)

    def walk(self, num_drafts: int) -> list[list[int]]:
        """Accepted drafts of each round of each request."""
        walks: list[list[int]] = [[] for _ in self.starts]
        anchors, ends = self.starts.clone(), self.ends
        active = (anchors < ends).nonzero().flatten()
        while len(active):
            counts = self._round(active, anchors[active], num_drafts)
            for i, count in zip(active.tolist(), counts.tolist(), strict=True):
                walks[i].append(count)
            anchors[active] += counts + 1
            active = active[anchors[active] < ends[active]]
        return walks

    def _round(self, rows: Tensor, anchors: Tensor, num_drafts: int) -> Tensor:
        """Accepted drafts of one round of the requests `rows`."""
        length = int(anchors.max())
        context = [(key[rows, :, :length], value[rows, :, :length]) for key, value in self.context]
        hidden = draft_hidden(
            self.drafter,
            self.embedding,
            context,
            self.ids[rows].gather(1, anchors[:, None]),
            anchors[:, None],
            num_drafts,
        )[:, 0]
        slots = torch.arange(1, num_drafts + 1, device=anchors.device)
        where = (anchors[:, None] + slots).clamp(max=self.ids.shape[1] - 1)
        recorded = self.ids[rows].gather(1, where)
        return leading_matches(hidden, self.head, recorded, self.ends[rows] - anchors - 1)


def leading_matches(
    hidden_BKH: Tensor, head: Tensor, recorded_BK: Tensor, most_B: Tensor
) -> Tensor:
    """How many drafts equal the recorded tokens before the first that does not, at most most_B.

    Slot by slot: what stands behind a mismatch is never looked at, and the head is most of the
    cost of a round.
    """
    counts = torch.zeros_like(most_B)
    going = torch.arange(len(most_B), device=most_B.device)
    for k in range(recorded_BK.shape[1]):
        going = going[most_B[going] > k]
        if not len(going):
            break
        drafts = (hidden_BKH[going, k] @ head.T).argmax(-1)
        going = going[drafts == recorded_BK[going, k]]
        counts[going] += 1
    return counts


def draft_hidden(
    drafter: Drafter,
    embedding: Tensor,
    context: ContextKV,
    anchor_tokens_BN: Tensor,
    anchors_BN: Tensor,
    num_drafts: int,
) -> Tensor:
    """Hidden states [B, N, K, H] of the drafts behind each anchor; times head.T, their logits.

    K+1 slots are laid out, as vLLM does.
    """
    embeds = block_embeds(embedding, anchor_tokens_BN, drafter.cfg.mask_token_id, num_drafts + 1)
    return drafter(context, embeds, anchors_BN)[:, :, 1:]


def _pad(tensors: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True)
