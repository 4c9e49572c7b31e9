"""What a selector could gain: how often the target's token is among the likeliest of its slot."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dflash.model import ROWS_PER_CHUNK, Drafter
from dflash.replay import Replayable, draft_hidden


@dataclass(frozen=True)
class Recall:
    """Sums over rounds, to be added up and divided once.

    slots: those that the target looked at, so all of a round up to its first wrong draft; hits:
    those whose recorded token was among the candidates. accepted: drafts that a perfect choice
    among the candidates would have got accepted after the same anchors.
    """

    slots: int = 0
    hits: int = 0
    rounds: int = 0
    accepted: int = 0

    def __add__(self, other: "Recall") -> "Recall":
        return Recall(
            self.slots + other.slots,
            self.hits + other.hits,
            self.rounds + other.rounds,
            self.accepted + other.accepted,
        )

    def metrics(self) -> dict[str, float]:
        """Conditional recall, and the acceptance length of a perfect choice; {} without rounds."""
        if not self.rounds or not self.slots:
            return {}
        return {
            "val_recall": self.hits / self.slots,
            "val_oracle_tau": 1 + self.accepted / self.rounds,
        }


@torch.inference_mode()
def recall(
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    request: Replayable,
    rounds: Sequence[int],
    num_drafts: int,
    top_k: int,
) -> Recall:
    """Recall of the `top_k` likeliest tokens in the replayed rounds of a request, in one forward.

    rounds: accepted drafts, as `replay` gives them for `num_drafts`. An answer whose rounds are few
    fits into memory; so callers choose some requests.
    """
    if not rounds:
        return Recall()
    device = embedding.device
    steps = accumulate((count + 1 for count in rounds), initial=request.num_prompt)
    anchors = torch.tensor(list(steps)[:-1], device=device)
    ids, last = request.ids.to(device), len(request.ids) - 1
    slots = torch.arange(1, num_drafts + 1, device=device)
    room = (last - anchors - 1)[:, None]  # the token that ends the answer is no draft
    truth = ids[(anchors[:, None] + slots).clamp(max=last)]
    context = drafter.context(request.features[None].to(embedding))
    hidden = draft_hidden(
        drafter, embedding, context, ids[anchors][None], anchors[None], num_drafts
    )[0].flatten(0, 1)
    found = [
        drafter.logits(rows, head).topk(top_k).indices for rows in hidden.split(ROWS_PER_CHUNK)
    ]
    among = (torch.cat(found) == truth.flatten()[:, None]).any(1).view(truth.shape)
    reached = slots <= torch.tensor(rounds, device=device)[:, None] + 1
    looked_at = reached & (slots <= room)
    perfect = torch.minimum(among.long().cumprod(1).sum(1), room[:, 0])
    return Recall(
        int(looked_at.sum()), int((among & looked_at).sum()), len(rounds), int(perfect.sum())
    )
