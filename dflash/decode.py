"""The reference decoder: real draft/verify rounds with a Transformers target, for one request.

Slow and simple on purpose: replay, vLLM and z-lab's client are all judged against it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.model import ContextKV, Drafter
from dflash.replay import draft_hidden
from dflash.sampling import GREEDY, Sampling, draft_probabilities, probabilities, verify
from dflash.target_model import Taps, Target, backbone


@dataclass(frozen=True)
class Decoded:
    """Output ids, accepted drafts per round, and the target's top-2 logit gap at each token."""

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
    sampling: Sampling = GREEDY,
    probabilistic: bool = False,
    seed: int = 0,
) -> Decoded:
    """Decode in rounds of `num_drafts` drafts; without a drafter, token by token.

    Drafts are the drafter's argmax. If `probabilistic`, they are drawn from its distribution at the
    same temperature (vLLM's draft_sample_method; its default is the argmax). Accepted counts follow
    dflash.acceptance: they are cut at the end of text, and the first token belongs to no round.
    """
    state = _State(target, drafter)
    draw = torch.Generator().manual_seed(seed)
    output: list[int] = []
    accepted: list[int] = []
    gaps: list[float] = []
    while not _ended(output, max_tokens, eos_ids):
        drafts, q = [], None
        if drafter is not None and output:
            hidden = state.propose(output[-1], num_drafts)
            by = sampling if probabilistic else GREEDY
            drafts, q = choose_drafts(drafter, hidden, target.head, output[-1], by, draw)
        known = output[-1:] or list(prompt_ids)  # the anchor; the first time, the prompt
        logits = state.forward([*known, *drafts], rows=len(drafts) + 1)
        matched, last = verify(probabilities(logits, sampling), drafts, q, draw)
        state.keep(len(known) + matched)
        emitted = _cut([*drafts[:matched], last], max_tokens - len(output), eos_ids)
        if drafter is not None and output:
            accepted.append(len(emitted) - 1)
        best = logits[: len(emitted)].topk(2).values
        gaps += (best[:, 0] - best[:, 1]).tolist()
        output += emitted
    return Decoded(output, accepted, gaps)


class _State:
    """The target's cache and the drafter's context, both ending just before the anchor."""

    def __init__(self, target: Target, drafter: Drafter | None):
        from transformers import DynamicCache  # imported late, as in dflash/target_model.py

        self.target, self.drafter, self.device = target, drafter, target.embedding.device
        self.cache = DynamicCache(config=target.model.config)
        self.context: ContextKV = []
        self.features: Tensor | None = None
        self.length = 0

    def forward(self, ids: list[int], rows: int) -> Tensor:
        """The target's logits [rows, V] after each of the last `rows` ids, float32 on the CPU."""
        taps = self.drafter.cfg.target_layer_ids if self.drafter else ()
        with Taps(self.target.model, taps) as tapped:
            hidden = backbone(self.target.model)(
                input_ids=torch.tensor([ids], device=self.device),
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state[0]
        self.features = tapped.joined() if taps else None
        return self.target.logits(hidden[-rows:]).float().cpu()

    def keep(self, count: int) -> None:
        """Keep the first `count` ids of the last forward, drop the rest from both caches."""
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

    def propose(self, anchor_token: int, num_drafts: int) -> Tensor:
        """The drafter's hidden states [K, H] after the anchor."""
        assert self.drafter is not None
        anchor, position = torch.tensor([[[anchor_token]], [[self.length]]], device=self.device)
        embedding = self.target.embedding
        hidden = draft_hidden(self.drafter, embedding, self.context, anchor, position, num_drafts)
        return hidden[0, 0]


def choose_drafts(
    drafter: Drafter,
    hidden_KH: Tensor,
    head: Tensor,
    anchor_token: int,
    sampling: Sampling,
    draw: torch.Generator,
) -> tuple[list[int], Tensor | None]:
    """The drafts of a block, and the distribution [K, V] that each was drawn from (None: greedy).

    One after the other, because a selector scores a draft after the one before it. Random draws are
    made on the CPU.
    """
    drafts, known, previous = [], [], torch.tensor([anchor_token], device=hidden_KH.device)
    logits = drafter.logits(hidden_KH, head)
    for k in range(len(hidden_KH)):
        scores = logits[k : k + 1]
        if drafter.candidate_selector is not None:
            scores = drafter.candidate_selector.rescored(hidden_KH[k : k + 1], scores, previous)
        if sampling.temperature == 0:
            previous = scores.argmax(-1)
        else:
            known.append(draft_probabilities(scores.cpu(), sampling))
            previous = torch.multinomial(known[-1], 1, generator=draw)[0].to(hidden_KH.device)
        drafts.append(int(previous))
    return drafts, torch.cat(known) if known else None


def _ended(output: list[int], max_tokens: int, eos_ids: Sequence[int]) -> bool:
    return len(output) >= max_tokens or (bool(output) and output[-1] in eos_ids)


def _cut(tokens: list[int], room: int, eos_ids: Sequence[int]) -> list[int]:
    for i, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: min(i + 1, room)]
    return tokens[:room]
