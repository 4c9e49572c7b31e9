"""Which single fault explains a drafter: draft again, with one assumption changed at a time.

The table of hypotheses answers two questions. First, an engine has drafted on known contexts: which
change to our forward gives the same tokens? This finds an engine that computes something else.
Second, without an engine: under which change are more drafts right than under the drafter's own
config? This finds a folder whose config has wrong taps, RoPE or mask token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dflash.drafter_config import DrafterConfig
from dflash.hypotheses import AS_CONFIGURED, Hypothesis
from dflash.model import Drafter, block_embeds
from dflash.replay import Request
from dflash.target_model import Target

ROUNDS = 64
"""Rounds on which hypotheses are compared: more would not change the answer."""
ROWS = 256
"""Positions whose logits over the whole vocabulary are in memory at a time."""
ANCHORS = 32
"""Anchors per answer on which hypotheses about config.json are compared (`fits_better`)."""
REPRODUCED = 0.98
"""Share of drafts that a hypothesis must reproduce, up to near ties, to be named as the cause."""


@dataclass(frozen=True)
class Answer:
    """A prompt with its greedy answer, and what the target computed on it.

    ids [P + n] int64. layers: layer id -> output [P + n, H]. gaps [n] float32: the logit of the
    target's argmax minus that of the answer's token, divided by the largest absolute logit of the
    position; 0 where the two are the same token. All on the CPU, whatever device computed them.
    """

    ids: Tensor
    num_prompt: int
    layers: dict[int, Tensor]
    gaps: Tensor

    def request(self, taps: Sequence[int], shift: int = 0) -> Request:
        """The answer as a request for replay, its features read `shift` layers beside the taps."""
        features = torch.cat([self.layers[tap + shift] for tap in taps], dim=-1)
        return Request(self.ids, self.num_prompt, features)


def read_answer(
    target: Target,
    cfg: DrafterConfig,
    prompt: Sequence[int],
    output: Sequence[int],
    shifts: Sequence[int] = (-1, 0, 1),
) -> Answer:
    """One teacher-forced pass over prompt + output. Keeps the layers at these `shifts` of each tap.

    The whole answer is in memory. With `shifts=(0,)` it holds no more layers than replay reads.
    """
    near = {tap + shift for tap in cfg.target_layer_ids for shift in shifts}
    layers = sorted(near & set(range(target.num_layers)))
    features = target.features([[*prompt, *output]], layers)[0]
    ids = torch.tensor([*prompt, *output])
    split = features.taps.cpu().chunk(len(layers), dim=-1)
    return Answer(
        ids=ids,
        num_prompt=len(prompt),
        layers=dict(zip(layers, split, strict=True)),
        gaps=_gaps(target, features.last[len(prompt) - 1 : -1], ids[len(prompt) :]),
    )


def _gaps(target: Target, last: Tensor, tokens: Tensor) -> Tensor:
    """`Answer.gaps` from hidden states `last` [n, H] and the tokens [n] that follow them."""
    found = []
    for rows, mine in zip(last.split(ROWS), tokens.split(ROWS), strict=True):
        logits = target.logits(rows).float().cpu()
        gaps = logits.max(-1).values - logits.gather(1, mine[:, None])[:, 0]
        found.append(gaps / largest_logit(logits))
    return torch.cat(found)


@dataclass(frozen=True)
class Trace:
    """What an engine drafted for one answer: accepted per round (cut at the end), drafts [R, K].

    Raises ValueError if the drafts cannot have given these counts: then they were recorded for
    other rounds, and comparing them would say nothing.
    """

    name: str
    answer: Answer
    accepted: list[int]
    drafts: Tensor

    def __post_init__(self) -> None:
        end = len(self.answer.ids)
        for i, (anchor, accepted) in enumerate(zip(self.anchors, self.accepted, strict=True)):
            truth = self.answer.ids[anchor + 1 : anchor + 1 + self.drafts.shape[1]]
            matched = int((self.drafts[i, : len(truth)] == truth).long().cumprod(0).sum())
            if min(matched, end - anchor - 2) != accepted:
                raise ValueError(
                    f"{self.name}, round {i}: the recorded drafts match {matched} tokens of the "
                    f"answer, the engine counted {accepted}: they belong to another round"
                )

    @property
    def anchors(self) -> list[int]:
        """Absolute position of every round's anchor; the first is the first output token."""
        steps = (a + 1 for a in self.accepted)
        return list(accumulate(steps, initial=self.answer.num_prompt))[:-1]


@dataclass(frozen=True)
class Mismatch:
    """A draft that differs from the engine's: our logit of `ours` is `gap` above that of `theirs`.

    largest: the largest absolute logit of this slot. The gap is judged relative to it.
    """

    trace: str
    anchor: int
    slot: int
    ours: int
    theirs: int
    gap: float
    largest: float


@dataclass(frozen=True)
class Agreement:
    """Drafts compared one by one."""

    drafts: int
    mismatches: list[Mismatch]

    def near_ties(self, ties: float) -> list[Mismatch]:
        """Mismatches whose two tokens lie closer than `ties` times the slot's largest logit."""
        return [m for m in self.mismatches if m.gap < ties * m.largest]

    def beyond(self, ties: float) -> int:
        """Number of mismatches that are not near ties."""
        return len(self.mismatches) - len(self.near_ties(ties))

    def share(self, ties: float) -> float:
        """Share of drafts that are equal, or differ at a near tie."""
        return 1 - (len(self.mismatches) - len(self.near_ties(ties))) / self.drafts


@torch.inference_mode()
def compare(
    hypothesis: Hypothesis,
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    traces: Sequence[Trace],
    max_rounds: int | None = None,
) -> Agreement:
    """Compare drafts under a hypothesis with those of the traces, in their first `max_rounds`
    rounds (None: all).

    Raises ValueError if the traces hold no draft.
    """
    changed = hypothesis.change(drafter)
    total, mismatches, left = 0, [], max_rounds or sum(len(t.accepted) for t in traces)
    for trace in traces:
        request = trace.answer.request(drafter.cfg.target_layer_ids, hypothesis.tap_shift)
        rounds = slice(0, min(left, len(trace.accepted)))
        theirs, anchors = trace.drafts[rounds], torch.tensor(trace.anchors[rounds])
        left -= len(anchors)
        if not theirs.numel():
            continue
        total += theirs.numel()
        logits = draft_scores(changed, embedding, head, request, anchors, theirs)
        mismatches += _mismatches(trace, anchors, logits.float(), theirs)
    if not total:
        raise ValueError("no draft was recorded: nothing to compare")
    return Agreement(total, mismatches)


@torch.inference_mode()
def own_noise(
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    traces: Sequence[Trace],
    again: Callable[[Trace], Tensor],
) -> Agreement:
    """Which drafts rounding alone changes: our drafts against `again(trace)`, our drafts [R, K]
    from a forward in another precision. An engine rounds in its own way and may differ twice as
    much.
    """
    mismatches = []
    for trace in traces:
        if not trace.drafts.numel():  # an answer of one token has no round
            continue
        anchors, request = (
            torch.tensor(trace.anchors),
            trace.answer.request(drafter.cfg.target_layer_ids),
        )
        logits = draft_scores(drafter, embedding, head, request, anchors, trace.drafts)
        mismatches += _mismatches(trace, anchors, logits.float(), again(trace))
    return Agreement(sum(t.drafts.numel() for t in traces), mismatches)


def draft_scores(
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    request: Request,
    anchors: Tensor,
    drafts: Tensor,
) -> Tensor:
    """What the drafts [N, K] after each anchor [N] of one answer were chosen by, in one forward:
    `Drafter.scores` [N, K, V] of each slot, after the draft before it.

    Computed on the embedding's device, returned on the CPU.
    """
    device, slots, mask = embedding.device, drafts.shape[1] + 1, drafter.cfg.mask_token_id
    context = drafter.context(request.features[None].to(embedding))
    tokens = request.ids[anchors]
    embeds = block_embeds(embedding, tokens[None].to(device), mask, slots)
    hidden = drafter(context, embeds, anchors[None].to(device))[0, :, 1:]
    previous = torch.cat([tokens[:, None], drafts[:, :-1]], 1).to(device)
    scores = drafter.scores(hidden.flatten(0, 1), head, previous.flatten())
    return scores.view(len(anchors), slots - 1, -1).cpu()


def largest_logit(logits: Tensor) -> Tensor:
    """Largest absolute logit of each row of [..., V], without tokens that cannot be drafted."""
    return torch.maximum(
        logits.max(-1).values, -logits.masked_fill(logits.isinf(), 0).min(-1).values
    )


def _mismatches(trace: Trace, anchors: Tensor, logits: Tensor, theirs: Tensor) -> list[Mismatch]:
    best, largest = logits.max(-1), largest_logit(logits)
    gaps = best.values - logits.gather(-1, theirs[..., None])[..., 0]
    return [
        Mismatch(
            trace=trace.name,
            anchor=int(anchors[i]),
            slot=int(k) + 1,
            ours=int(best.indices[i, k]),
            theirs=int(theirs[i, k]),
            gap=float(gaps[i, k]),
            largest=float(largest[i, k]),
        )
        for i, k in (best.indices != theirs).nonzero().tolist()
    ]


def explain(
    table: Sequence[Hypothesis],
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    traces: Sequence[Trace],
    ties: float,
    noise: float = 0.0,
) -> tuple[Hypothesis | None, list[tuple[Hypothesis, float]]]:
    """(the hypothesis that explains drafts that differ from ours, all hypotheses with the share of
    the drafts that each reproduces, best first).

    The first is None unless the best hypothesis reproduces REPRODUCED of all drafts, and nine of
    ten of those that differ as configured. The second condition is there because a change with
    little effect reproduces most drafts anyway. noise: the share of drafts that rounding alone may
    change beyond near ties; so many may differ.
    """

    def share(hypothesis: Hypothesis) -> float:
        found = compare(hypothesis, drafter, embedding, head, traces, ROUNDS)
        return found.share(ties)

    ranking = sorted(((h, share(h)) for h in table), key=lambda pair: -pair[1])
    best, again = ranking[0]
    left = max(0.0, 1 - again - noise) / (1 - share(AS_CONFIGURED) or 1)
    return (best if again >= REPRODUCED - noise and left <= 0.1 else None), ranking


def fits_better(
    table: Sequence[Hypothesis],
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    answers: Sequence[Answer],
    num_drafts: int,
) -> list[tuple[Hypothesis, float, float]]:
    """Hypotheses under which clearly more drafts are right than as configured, the best first.

    Each comes with two means over the same anchors: the number of right drafts in a row (at most
    `num_drafts`) under it, and as configured. "Clearly" means by 2 %, and by four standard errors
    of the paired difference. Empty for an untrained drafter: it is right under no hypothesis.
    """
    own = in_a_row(AS_CONFIGURED, drafter, embedding, head, answers, num_drafts)
    found = []
    for hypothesis in table:
        other = in_a_row(hypothesis, drafter, embedding, head, answers, num_drafts)
        gain = (other - own).sum()
        noise = 4 * (other - own).square().sum().sqrt()
        if gain > max(noise, 0.02 * own.sum()):
            found.append((hypothesis, float(other.mean()), float(own.mean())))
    return sorted(found, key=lambda item: -item[1])


@torch.inference_mode()
def in_a_row(
    hypothesis: Hypothesis,
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    answers: Sequence[Answer],
    num_drafts: int,
) -> Tensor:
    """Number of right drafts in a row after each of up to ANCHORS evenly spaced anchors per answer:
    float64 [anchors of all answers], a single 0 if no answer is long enough.
    """
    changed, found = hypothesis.change(drafter), []
    for answer in answers:
        first, last = answer.num_prompt, len(answer.ids) - 1 - num_drafts
        if last < first:
            continue  # too short for a whole block
        anchors = torch.linspace(first, last, min(ANCHORS, last - first + 1)).long()
        request = answer.request(drafter.cfg.target_layer_ids, hypothesis.tap_shift)
        truth = answer.ids[anchors[:, None] + 1 + torch.arange(num_drafts)]
        logits = draft_scores(changed, embedding, head, request, anchors, truth)
        found.append((logits.argmax(-1) == truth).double().cumprod(1).sum(1))
    return torch.cat(found) if found else torch.zeros(1, dtype=torch.float64)
