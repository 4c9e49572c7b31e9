"""Served against replayed acceptance, round by round: used by both `verify` and `preflight`.

Our target reads each served text once, and the drafter is replayed on these fresh features. The
accepted drafts of each round are compared with those that vLLM counted. The served text need not
equal the recorded one, so this works in every dtype, for sampled answers and for production
traffic. After a first difference the anchors of the two walks differ. So if walks differ, every
round is drafted again after the engine's own anchors, and no later difference is hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dflash.acceptance import num_rounds, positions, tau
from dflash.agreement import tie_bound
from dflash.diagnose import Answer, draft_scores, largest_logit, read_answer
from dflash.model import Drafter
from dflash.replay import Request, replay
from dflash.target_model import Target
from jobs.base.console import some_names
from serving.client import Completion
from serving.vllm_counts import rounds

POOLED, POSITION = 0.01, 0.01
"""How far served may be off replayed: pooled tau (relative), each position (absolute)."""
FEW = 3.0
"""So many tokens (of tau) or rounds (of a position) may always be off: of 100 rounds, one is a
whole point."""
IDENTICAL = 0.95
"""Least share of requests with identical rounds, unless rounding explains all differences."""
MAX_WRONG, FAR = 0.01, 3.0
"""The tail of the rounding errors: this share of tokens, drafts or rounds (at least one) may differ
by more than a near tie, but by less than FAR near ties. docs/decisions/031"""
CHUNK, ROUNDS = 16, 32
"""Answers with their features, and rounds with their logits, that are in memory at a time."""

Walk = list[int]
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A round that accepted `served` drafts in the engine and `replayed` under our forward.

    gap: difference in our logits between the recorded token and the best other one, in the slot
    that decides. Below `bound` it is a near tie: rounding in this dtype can reverse it.
    """

    request: str
    round: int
    anchor: int
    served: int
    replayed: int
    gap: float
    bound: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both walks of every request that has a round, and where they differ."""

    k: int
    names: list[str] = field(default_factory=list)
    served: list[Walk] = field(default_factory=list)
    replayed: list[Walk] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # tokens of each of these answers
    differences: list[Difference] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # the engine drafted less than k: no room

    @property
    def rounds(self) -> int:
        """Rounds that vLLM counted."""
        return num_rounds(self.served)

    @property
    def identical(self) -> int:
        """Requests with the same rounds on both sides."""
        return sum(a == b for a, b in zip(self.served, self.replayed, strict=True))

    @property
    def beyond(self) -> list[Difference]:
        """Differences that are not near ties."""
        return [d for d in self.differences if d.gap >= d.bound]

    @property
    def wrong(self) -> bool:
        """Whether differences beyond near ties are more than the tail of the rounding errors."""
        far = any(d.gap >= FAR * d.bound for d in self.beyond)
        return far or len(self.beyond) > max(1, MAX_WRONG * self.rounds)

    @property
    def near_ties(self) -> list[Difference]:
        """Differences between two correct computations, by rounding alone."""
        return [d for d in self.differences if d.gap < d.bound]

    def limits(self) -> tuple[float, float]:
        """How far pooled tau (relative) and a position (absolute) may be off.

        The limits are 1 % and 1 point. With few rounds they are larger: what near ties alone move
        by chance, three standard deviations of their sum with random signs, at least FEW.
        """
        moved = sum((d.served - d.replayed) ** 2 for d in self.near_ties)
        tokens = self.rounds * tau(self.served)
        ties = max(FEW, 3 * len(self.near_ties) ** 0.5)
        return max(POOLED, max(FEW, 3 * moved**0.5) / tokens), max(POSITION, ties / self.rounds)

    def faults(self) -> list[str]:
        """The limits that are exceeded, in words; [] if replay predicts what is served."""
        found, (pooled, position) = [], self.limits()
        ours, theirs = tau(self.replayed), tau(self.served)
        if abs(theirs / ours - 1) > pooled:
            found.append(
                f"served tau {theirs:.3f} is {theirs / ours - 1:+.1%} off the replayed "
                f"{ours:.3f} (limit {pooled:.1%})"
            )
        off = [b - a for a, b in zip(*self._positions(), strict=True)]
        worst = max(range(self.k), key=lambda i: abs(off[i]))
        if abs(off[worst]) > position:
            found.append(
                f"draft {worst + 1} is accepted {100 * abs(off[worst]):.1f} points "
                f"{'more' if off[worst] > 0 else 'less'} often than "
                f"replayed (limit {100 * position:.1f})"
            )
        if self.wrong and self.identical < IDENTICAL * len(self.names):
            found.append(
                f"only {self.identical} of {len(self.names)} requests have the replayed rounds "
                f"(limit {IDENTICAL:.0%}), and {len(self.beyond)} differing rounds are no near "
                f"ties (largest gap {max(d.gap for d in self.beyond):.3g})"
            )
        return found

    @property
    def whole(self) -> int:
        """Rounds with room for all drafts. Others are cut at the end of the answer, on both sides
        alike, which may hide a difference.
        """
        found = 0
        for length, walk in zip(self.lengths, self.served, strict=True):
            left = length - 1
            for accepted in walk:
                found += left > self.k
                left -= accepted + 1
        return found

    @property
    def unchecked(self) -> str:
        """Why the comparison says nothing; empty where it says something."""
        if self.whole:
            return ""
        if self.names:
            return "no served answer holds a whole block, so every round is cut at its end"
        if self.left_out:
            return f"the engine drafted less than {self.k} tokens for {self._some_left_out()}"
        return "no served answer has a second token, so there is no round to compare"

    def words(self) -> str:
        """How much agrees, as one line of text."""
        text = (
            f"{self.identical} of {len(self.names)} requests in identical rounds, "
            f"{len(self.near_ties)} rounds differ at near ties, {len(self.beyond)} otherwise"
        )
        if self.left_out:
            text += f"; drafted less than {self.k} tokens and left out: {self._some_left_out()}"
        return text

    def _some_left_out(self) -> str:
        return f"{len(self.left_out)} answers ({some_names(self.left_out)})"

    def _positions(self) -> tuple[list[float], list[float]]:
        return positions(self.replayed, self.k), positions(self.served, self.k)

    def summary(self) -> Row:
        """The part that is kept in results; {} without a round."""
        if not self.rounds:
            return {}
        pooled, position = self.limits()
        return {
            "requests": len(self.names),
            "identical_rounds": self.identical,
            "rounds": self.rounds,
            "differing_rounds": len(self.differences),
            "near_ties": len(self.near_ties),
            "tau_replay": tau(self.replayed),
            "tau_served": tau(self.served),
            "limits": {"pooled": pooled, "position": position, "identical": IDENTICAL},
            "faults": self.faults(),
            "unchecked": self.unchecked,
            "left_out": self.left_out,
            "differences": [asdict(d) for d in sorted(self.differences, key=lambda d: -d.gap)],
        }


def compare(
    target: Target,
    drafter: Drafter,
    answers: Sequence[tuple[str, Completion]],
    k: int,
    read: Callable[[Completion], Answer] | None = None,
) -> Comparison:
    """Replay the named answers that a server gave at one K, and compare with what it counted.

    `read` returns an answer with the target's features; by default the target reads it in one pass.
    Answers of one token have no round. Answers for which the server drafted less than k in some
    round are left out: replay always drafts k.
    """
    found = Comparison(k=k)

    def fresh(one: Completion) -> Answer:
        return read_answer(target, drafter.cfg, one.prompt_ids, one.output_ids, shifts=(0,))

    models = (drafter, target.embedding, target.head)
    for start in range(0, len(answers), CHUNK):
        chunk = [(name, (read or fresh)(one), rounds(one)) for name, one in answers[start:][:CHUNK]]
        found.left_out.extend(
            name for name, _, (_, drafted) in chunk if any(n < k for n in drafted)
        )
        kept = [one for one in chunk if one[2][0] and one[0] not in found.left_out]
        requests = [answer.request(drafter.cfg.target_layer_ids) for _, answer, _ in kept]
        walks = replay(*models, requests, k)
        for (name, _, (served, _)), request, walk in zip(kept, requests, walks, strict=True):
            found.names.append(name)
            found.served.append(served)
            found.replayed.append(walk)
            found.lengths.append(request.num_output)
            if served != walk:
                found.differences.extend(differing(models, name, request, served, walk, k))
    return found


def unexplained(reference: Row) -> list[str]:
    """Ids of requests whose replay differs from the reference decoder by more than near ties."""
    return [one["sample_id"] for one in reference["differing"] if not one.get("near_tie")]


@torch.inference_mode()
def differing(
    models: tuple[Drafter, Tensor, Tensor],
    name: str,
    request: Request,
    served: Walk,
    replayed: Walk,
    k: int,
) -> list[Difference]:
    """The rounds in which another number of our drafts is accepted, after the engine's own anchors.

    There may be none although the walks differ: then two of our own forwards have broken a tie
    differently, and the first round in which the walks differ is returned.
    """
    margins, sizes, ours = [], [], []
    anchors = torch.tensor(list(accumulate((a + 1 for a in served), initial=request.num_prompt)))
    anchors = anchors[:-1]
    for some in anchors.split(ROUNDS):
        where = some[:, None] + torch.arange(1, k + 1)
        truth = request.ids[where.clamp(max=len(request.ids) - 1)]
        logits = draft_scores(*models, request, some, truth).float()
        margin, matched = _margins(truth, logits)
        margins.append(margin)
        sizes.append(largest_logit(logits))
        ours += torch.minimum(matched, len(request.ids) - 2 - some).tolist()
    margin, size, dtype = torch.cat(margins), torch.cat(sizes), models[1].dtype
    found = [i for i, (a, b) in enumerate(zip(served, ours, strict=True)) if a != b]
    if not found:
        first = next(i for i, (a, b) in enumerate(zip(served, replayed, strict=False)) if a != b)
        found, ours[first] = [first], replayed[first]
    slots = [(i, min(served[i], ours[i])) for i in found]
    return [
        Difference(
            request=name,
            round=i,
            anchor=int(anchors[i]),
            served=served[i],
            replayed=ours[i],
            gap=abs(float(margin[i, slot])),
            bound=tie_bound(dtype, float(size[i, slot])),
        )
        for i, slot in slots
    ]


def _margins(truth: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """By how much the recorded token of each slot, `truth` [N, K], beats all others in our logits
    (negative: it loses), and how many drafts in a row are the recorded tokens [N].
    """
    best = logits.topk(2)
    other = torch.where(best.indices[..., 0] == truth, best.values[..., 1], best.values[..., 0])
    margin = logits.gather(-1, truth[..., None])[..., 0] - other
    matched = (best.indices[..., 0] == truth).long().cumprod(1).sum(1)
    return margin, matched


def table(rows: Sequence[Row], accepted: Sequence[Walk], k: int) -> Row:
    """Tau pooled and per domain, and acceptance per position, of requests that have a round."""
    names = sorted({row["domain"] for row, walk in zip(rows, accepted, strict=True) if walk})
    return {
        "pooled": tau(accepted),
        "domains": {
            n: tau([a for row, a in zip(rows, accepted, strict=True) if row["domain"] == n])
            for n in names
        },
        "positions": positions(accepted, k),
    }
