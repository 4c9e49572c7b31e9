"""Replay: walk the draft/verify loop over a known greedy output with the drafter alone.

For greedy decoding the target's verdict is already in the recorded answer: a draft is accepted
exactly while it equals the recorded token. So one pass over the features gives the context, and
each round costs one drafter forward.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.model import ContextKV, Drafter, block_embeds

ROWS_PER_CHUNK = 128
"""Drafts compared with the whole vocabulary at a time."""

Accepted = tuple[Tensor, Tensor, Tensor]
"""Of drafts accepted in a round: hidden states [M, H], tokens [M], requests [M]."""


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
    """Requests that walk together, with the context of all their positions.

    The head costs most. So a round compares drafts with `candidates` only, its rows for the tokens
    of these requests: a recorded token that one of them beats is not the draft. Those that none
    beats are accepted for now and checked against the whole vocabulary at the end of the walk, all
    in one product; where another token wins, it becomes a candidate and its request walks again.
    """

    def __init__(
        self, drafter: Drafter, embedding: Tensor, head: Tensor, requests: Sequence[Request]
    ):
        device = embedding.device
        self.drafter, self.embedding = drafter, embedding
        self.tokens, self.head = drafter.draft_head(head)
        self.context = drafter.context(_pad([r.features for r in requests]).to(embedding))
        self.ids = _pad([r.ids for r in requests]).to(device)
        self.starts = torch.tensor([r.num_prompt for r in requests], device=device)
        self.ends = torch.tensor([len(r.ids) - 1 for r in requests], device=device)
        # The first token stands in where none of the recorded ones can be drafted.
        known = torch.cat([self.ids.flatten(), self.tokens[:1]])
        self.candidates = torch.isin(self.tokens, known).nonzero().flatten()

    def walk(self, num_drafts: int) -> list[list[int]]:
        """Accepted drafts of each round of each request."""
        walks: list[list[int]] = [[] for _ in self.starts]
        wrong = (self.starts < self.ends).nonzero().flatten()
        while len(wrong):
            for i in wrong.tolist():
                walks[i] = []
            wrong = self._check(self._walk(wrong, num_drafts, walks))
        return walks

    def _walk(self, rows: Tensor, num_drafts: int, walks: list[list[int]]) -> list[Accepted]:
        anchors, accepted, active = self.starts.clone(), [], rows
        head = self.head[self.candidates]
        while len(active):
            hidden, recorded = self._drafts(active, anchors[active], num_drafts)
            drafts = self.tokens[self.candidates[(hidden @ head.T).argmax(-1)]]
            matched = (drafts == recorded).long().cumprod(1).sum(1)
            counts = torch.minimum(matched, self.ends[active] - anchors[active] - 1)
            for i, count in zip(active.tolist(), counts.tolist(), strict=True):
                walks[i].append(count)
            kept = torch.arange(num_drafts, device=counts.device) < counts[:, None]
            owners = active[:, None].expand_as(kept)
            accepted.append((hidden[kept], recorded[kept], owners[kept]))
            anchors[active] += counts + 1
            active = active[anchors[active] < self.ends[active]]
        return accepted

    def _drafts(self, rows: Tensor, anchors: Tensor, num_drafts: int) -> tuple[Tensor, Tensor]:
        """Of one round of the requests `rows`: hidden [R, K, H] and the recorded tokens [R, K]."""
        length = int(anchors.max())
        context = [(key[rows, :, :length], value[rows, :, :length]) for key, value in self.context]
        tokens = self.ids[rows].gather(1, anchors[:, None])
        hidden = draft_hidden(
            self.drafter, self.embedding, context, tokens, anchors[:, None], num_drafts
        )
        slots = torch.arange(1, num_drafts + 1, device=anchors.device)
        where = (anchors[:, None] + slots).clamp(max=self.ids.shape[1] - 1)
        return hidden[:, 0], self.ids[rows].gather(1, where)

    def _check(self, accepted: list[Accepted]) -> Tensor:
        """The requests with an accepted draft that is not the argmax; the argmaxes are added."""
        hidden, tokens, owners = (torch.cat(parts) for parts in zip(*accepted, strict=True))
        best = torch.cat([(part @ self.head.T).argmax(-1) for part in hidden.split(ROWS_PER_CHUNK)])
        wrong = self.tokens[best] != tokens
        self.candidates = torch.cat([self.candidates, best[wrong]]).unique()
        return owners[wrong].unique()


def draft_hidden(
    drafter: Drafter,
    embedding: Tensor,
    context: ContextKV,
    anchor_tokens_BN: Tensor,
    anchors_BN: Tensor,
    num_drafts: int,
) -> Tensor:
    """Hidden states [B, N, K, H] of the drafts behind each anchor, for `Drafter.logits`.

    K+1 slots are laid out, as vLLM does.
    """
    embeds = block_embeds(embedding, anchor_tokens_BN, drafter.cfg.mask_token_id, num_drafts + 1)
    return drafter(context, embeds, anchors_BN)[:, :, 1:]


def _pad(tensors: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True)
