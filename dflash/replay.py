"""Replay: walk the draft/verify loop over a known greedy output with the drafter alone.

For greedy decoding the target's verdict is already in the recorded answer: a draft is accepted
exactly while it equals the recorded token. So one pass over the features gives the context, and
each round costs one drafter block. Blocks of many requests, and of many anchors of a request, share
a forward; the walk is then a jump from anchor to anchor over integers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dflash.model import (
    ROWS_PER_CHUNK,
    ContextKV,
    Drafter,
    accepted_drafts,
    accepted_prefix,
    against,
    block_embeds,
)

SLOTS_AT_ONCE = 4096
"""Slots of a forward that looks ahead; more are not faster and take more memory."""

SLOTS_OF_A_REQUEST = 512
"""Of these at most so many of one request: each of them is masked against each other."""

SLOTS_OF_A_FORWARD = 24
"""What a forward costs beside its slots, in slots. Measured in float32 on AVX2: 9 ms, and 0.36 ms a
slot (2 layers, hidden size 576)."""

PLACES_OF_A_SLOT = 256
"""Positions of context that are copied and read in the time of one slot."""

HALF_PRECISION = 8
"""How many times as fast as in float32 a slot is in half precision, where both costs above hardly
change (an assumption, as vendors state it; not measured)."""

FLOAT32_SLACK = 1e-5
"""How far two float32 products of the same numbers may lie apart, as a share of the largest. They
add in another order (measured: 2.4e-6 over 576 terms). In bfloat16 the sums are float32 and rounded
once. So a logit changes by at most one unit in the last place, and the gap between two by two."""

Accepted = tuple[Tensor, Tensor, Tensor, Tensor]
"""Drafts accepted in a round: hidden states [M, H]; tokens, requests and places in the row [M]."""


class Replayable(Protocol):
    """What is replayed. Its features may be read when they are asked for."""

    @property
    def ids(self) -> Tensor:
        """[P + n] int64 of prompt and output."""
        ...

    @property
    def num_prompt(self) -> int:
        """P, the tokens of the prompt."""
        ...

    @property
    def num_output(self) -> int:
        """n, the tokens of the answer."""
        ...

    @property
    def features(self) -> Tensor:
        """[>= P + n - 1, F], in any dtype."""
        ...


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
    requests: Sequence[Replayable],
    num_drafts: int,
    batch_tokens: int = 16384,
) -> list[list[int]]:
    """Accepted drafts of every round of every request, in the order of `requests`.

    num_drafts: K in 1..block_size-1, as served. vLLM gives a drafter K+1 slots: later slots do not
    exist, so drafts for different K differ. Requests of one output token have no round.
    Raises ValueError for K out of range.
    """
    return replay_many(drafter, embedding, head, requests, [num_drafts], batch_tokens)[num_drafts]


@torch.inference_mode()
def replay_many(
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    requests: Sequence[Replayable],
    ks: Sequence[int],
    batch_tokens: int = 16384,
    progress: Callable[[int], object] = lambda done: None,
) -> dict[int, list[list[int]]]:
    """`replay` for several K; the context of a request is projected once for all of them.

    batch_tokens: positions that are walked together, padding included. progress: called after each
    batch with the number of its requests.
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
    """Indices in groups of similar length. A group has at most batch_tokens positions, padding
    included, or a single request.
    """
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

    The product with the head costs most. So a round computes logits only for `candidates`: the
    rows of the head for the tokens that occur in these requests. If one of them clearly beats the
    recorded token, the recorded token is not the draft. Otherwise it is accepted for now. At the
    end of the walk all accepted drafts are checked against the whole vocabulary, and this check
    alone decides. Where another token wins, that token becomes a candidate, and the request is
    walked again from that place.

    A selector (DFlash 2) chooses among the likeliest tokens of the whole vocabulary, so there every
    round is judged by all of it, and nothing is left to check.
    """

    def __init__(
        self, drafter: Drafter, embedding: Tensor, head: Tensor, requests: Sequence[Replayable]
    ):
        device = embedding.device
        self.drafter, self.embedding = drafter, embedding
        self.tokens, self.head = drafter.draft_head(head)
        self.context = drafter.context(_pad([r.features for r in requests]).to(embedding))
        self.ids = _pad([r.ids for r in requests]).to(device)
        self.starts = torch.tensor([r.num_prompt for r in requests], device=device)
        self.ends = torch.tensor([len(r.ids) - 1 for r in requests], device=device)
        # One candidate at least, even if none of the recorded tokens can be drafted.
        known = torch.cat([self.ids.flatten(), self.tokens[:1]])
        self._compare_with(torch.isin(self.tokens, known).nonzero().flatten())

    def walk(self, num_drafts: int) -> list[list[int]]:
        """Accepted drafts of each round of each request.

        The loop ends however the products round: in each pass, every request that goes on gains at
        least one round that is final.
        """
        walks: list[list[int]] = [[] for _ in self.starts]
        anchors = self.starts.clone()
        active = (anchors < self.ends).nonzero().flatten()
        while len(active):
            wrong = self._check(self._walk(active, anchors, num_drafts, walks))
            for i, place in wrong.items():
                walks[i] = _cut(walks[i], place - int(self.starts[i]))
                anchors[i] = place
            active = torch.tensor(sorted(wrong), dtype=torch.int64, device=anchors.device)
        return walks

    def _walk(
        self, active: Tensor, anchors: Tensor, num_drafts: int, walks: list[list[int]]
    ) -> list[Accepted]:
        """Walk the requests `active` from their anchors to their ends; accept all that may win.

        Each forward drafts after a window of N successive anchors of every request. Which of them
        are on the walk follows from the counts.
        """
        accepted, rounds, walked, ahead = [], 0, 0, 1
        slots = torch.arange(num_drafts + 1, device=anchors.device)
        while len(active):
            last = self.ends[active] - 1
            room = last + 1 - anchors[active]
            window = torch.arange(min(ahead, int(room.max())), device=anchors.device)
            window_RN = (anchors[active, None] + window).minimum(last[:, None])
            where_RNS = window_RN[..., None] + slots
            hidden_RNKH, tokens_RNS = self._drafts(active, where_RNS)
            counts_RN = self._counts(hidden_RNKH.flatten(0, 1), tokens_RNS.flatten(0, 1))
            counts_RN = counts_RN.view_as(window_RN).minimum(last[:, None] - window_RN)
            counts = counts_RN.tolist()
            paths = [jumps(row, most) for row, most in zip(counts, room.tolist(), strict=True)]
            taken_RN, steps = torch.zeros(window_RN.shape, dtype=torch.bool), []
            for row, (i, path) in enumerate(zip(active.tolist(), paths, strict=True)):
                walks[i] += [counts[row][place] for place in path]
                taken_RN[row, path] = True
                steps.append(path[-1] + counts[row][path[-1]] + 1)
            anchors[active] += torch.tensor(steps, device=anchors.device)
            rounds, walked = rounds + sum(map(len, paths)), walked + sum(steps)
            kept = taken_RN.to(slots.device)[..., None] & (slots[1:] <= counts_RN[..., None])
            owners_RNK = active[:, None, None].expand_as(kept)
            recorded_RNK, places_RNK = tokens_RNS[..., 1:], where_RNS[..., 1:]
            accepted.append(
                (hidden_RNKH[kept], recorded_RNK[kept], owners_RNK[kept], places_RNK[kept])
            )
            active = active[anchors[active] < self.ends[active]]
            # With a selector every anchor costs products with the whole head: none in vain there.
            if self.drafter.candidate_selector is None:
                ahead = self._ahead(active, anchors, num_drafts + 1, walked / rounds)
        return accepted

    def _ahead(self, active: Tensor, anchors: Tensor, slots: int, tau: float) -> int:
        """N: after how many successive anchors of each request to draft in the next forward.

        A forward costs f + R (c + N S) for R requests of c context and S slots, in slots. It takes
        each of them N - 1 + tau tokens further, as the other anchors are not on the walk. The ratio
        is monotonic in N. So the best N is 1, or as large as possible: if S (tau - 1) < f / R + c.
        """
        if not len(active):
            return 1
        half = self.embedding.dtype.itemsize < 4
        context = int(anchors[active].max()) / PLACES_OF_A_SLOT
        saved = (HALF_PRECISION if half else 1) * (SLOTS_OF_A_FORWARD / len(active) + context)
        if slots * (tau - 1) >= saved:
            return 1
        return max(1, min(SLOTS_OF_A_REQUEST, SLOTS_AT_ONCE // len(active)) // slots)

    def _drafts(self, rows: Tensor, where_RNS: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks of the requests `rows` at these places, S = K + 1 slots with the anchor first:
        hidden states of the drafts [R, N, K, H], and the recorded tokens [R, N, S].
        """
        anchors, num_drafts = where_RNS[..., 0], where_RNS.shape[2] - 1
        length = int(anchors.max())
        context = [(key[rows, :, :length], value[rows, :, :length]) for key, value in self.context]
        inside = where_RNS.clamp(max=self.ids.shape[1] - 1).flatten(1)
        tokens = self.ids[rows].gather(1, inside).view_as(where_RNS)
        hidden = draft_hidden(
            self.drafter, self.embedding, context, tokens[..., 0], anchors, num_drafts
        )
        return hidden, tokens

    def _counts(self, hidden_MKH: Tensor, tokens_MS: Tensor) -> Tensor:
        """How many drafts of each of M blocks may be accepted: int64 [M]. A draft is looked at only
        where all before it may be.

        tokens: the recorded ones, the anchor first.
        """
        if self.drafter.candidate_selector is not None:
            return accepted_drafts(self.drafter, hidden_MKH, self.head, tokens_MS)
        return accepted_prefix(
            hidden_MKH,
            tokens_MS,
            lambda hidden_MH, _, recorded_M: _may_win(
                against(hidden_MH, self.rows), self.known, recorded_M
            ),
        )

    def _check(self, accepted: list[Accepted]) -> dict[int, int]:
        """{request: place of its first accepted draft that is not the argmax}, without requests
        that have none. The argmaxes become candidates.
        """
        if self.drafter.candidate_selector is not None:  # accepted_drafts has judged them
            return {}
        hidden, tokens, owners, places = (torch.cat(parts) for parts in zip(*accepted, strict=True))
        best = [against(part, self.head).argmax(-1) for part in hidden.split(ROWS_PER_CHUNK)]
        best = torch.cat(best)
        wrong = self.tokens[best] != tokens
        self._compare_with(torch.cat([self.candidates, best[wrong]]).unique())
        found = zip(owners[wrong].tolist(), places[wrong].tolist(), strict=True)
        return dict(sorted(found, reverse=True))  # of equal keys the last stays: the first place

    def _compare_with(self, candidates: Tensor) -> None:
        self.candidates, self.known = candidates, self.tokens[candidates]
        self.rows = self.head[candidates]


def jumps(counts: Sequence[int], room: int) -> list[int]:
    """The places of a window of anchors that a walk from its first one visits, at most `room` - 1.

    counts: accepted drafts after each anchor. Example: [2, 0, 1, 0, 3] -> [0, 3, 4].
    """
    found, place = [], 0
    while place < min(len(counts), room):
        found.append(place)
        place += counts[place] + 1
    return found


def _may_win(logits_MC: Tensor, known_C: Tensor, recorded_M: Tensor) -> Tensor:
    """Whether the recorded token may be the argmax of the whole vocabulary: bool [M].

    known: tokens of the candidates, ascending. The product with the whole vocabulary may round in
    another way. So a recorded token that is only that little below the best candidate may win, too.
    """
    best = logits_MC.amax(-1).float()
    place = torch.searchsorted(known_C, recorded_M.contiguous()).clamp(max=len(known_C) - 1)
    own = logits_MC.gather(-1, place[..., None])[..., 0].float()
    slack = max(2 * torch.finfo(logits_MC.dtype).eps, FLOAT32_SLACK) * best.abs()
    return (known_C[place] == recorded_M) & (own >= best - slack)


def _cut(rounds: list[int], length: int) -> list[int]:
    """The rounds of a walk up to its token number `length`, which was wrongly accepted as a draft.
    The last round now ends with this token as the target's own.

    Example: rounds of 2 + 1, 3 + 1 and 0 + 1 tokens, and token 5 was wrong: [2, 1].
    """
    done = 0
    for r, count in enumerate(rounds):
        if done + count >= length:
            return [*rounds[:r], length - done - 1]
        done += count + 1
    raise AssertionError(f"place {length} lies behind a walk of {done} tokens")


def draft_hidden(
    drafter: Drafter,
    embedding: Tensor,
    context: ContextKV,
    anchor_tokens_BN: Tensor,
    anchors_BN: Tensor,
    num_drafts: int,
) -> Tensor:
    """Hidden states [B, N, K, H] of the drafts after each anchor, for `Drafter.logits`.

    K+1 slots are laid out, as vLLM does.
    """
    embeds = block_embeds(embedding, anchor_tokens_BN, drafter.cfg.mask_token_id, num_drafts + 1)
    return drafter(context, embeds, anchors_BN)[:, :, 1:]


def _pad(tensors: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True)
