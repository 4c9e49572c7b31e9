"""Replay of the val split during training, and the rule that decides which weights are kept."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed

from dflash.acceptance import tau
from dflash.checkpoint import cast
from dflash.drafter_config import DrafterConfig
from dflash.model import Drafter, drafter_of
from dflash.recall import Recall, recall
from dflash.replay import Replayable, replay
from jobs.dataset.slices import SHOWN

NO_RECALL = Recall()
RECALLED = 16
"""Val requests in which a selector's candidates are looked at: enough for a hint."""


@dataclass(frozen=True)
class Taus:
    """Replayed tau at the largest K: pooled over all val requests, and by domain. Domains with the
    most requests come first. recall: what a selector chose from, in some of the requests.
    """

    pooled: float
    domains: dict[str, float]
    recall: Recall = NO_RECALL

    def metrics(self) -> dict[str, float]:
        """{metric name: tau}. Of the domains only the SHOWN largest: there may be any number."""
        shown = list(self.domains.items())[:SHOWN]
        taus = {f"val_tau/{domain}": tau for domain, tau in shown}
        return {"val_tau": self.pooled} | taus | self.recall.metrics()


@dataclass(kw_only=True)
class Choice:
    """Which weights are the best so far: those with the highest tau on train.domain (pooled if that
    is empty). If training starts from a base, tau of every domain must also be at least
    (1 - max_slice_loss) times that of the base at step 0.
    """

    tau: float = 0.0
    step: int = -1
    stale: int = 0
    """Validations since `step`."""
    base: dict[str, float] = field(default_factory=dict)

    def offer(self, step: int, taus: Taus, domain: str, max_slice_loss: float) -> bool:
        """Whether the weights of `step` are the new best. The base itself always qualifies."""
        score = taus.domains[domain] if domain else taus.pooled
        better = score > self.tau and not self.losers(taus, max_slice_loss)
        if better:
            self.tau, self.step = score, step
        self.stale = 0 if better else self.stale + 1
        return better

    def losers(self, taus: Taus, max_slice_loss: float) -> list[str]:
        """Domains whose tau is below (1 - max_slice_loss) times that of the base."""
        return [d for d, tau in self.base.items() if taus.domains[d] < (1 - max_slice_loss) * tau]

    def state(self) -> dict[str, Any]:
        """For a checkpoint; `Choice(**state)` continues."""
        return asdict(self)


def as_exported(
    cfg: DrafterConfig, weights: dict[str, Tensor], stored: torch.dtype, computed: torch.dtype
) -> Drafter:
    """The drafter that `evaluate` would load from an export of these weights: rounded to the stored
    dtype, then cast to the dtype it computes in. So a val tau is the tau of the exported drafter.
    """
    return drafter_of(cfg, {k: cast(cast(t, stored), computed) for k, t in weights.items()})


def replay_val(
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    val: Sequence[tuple[str, Replayable]],
    rank: int,
    world: int,
) -> Taus:
    """Replay all val requests, each on one rank. All ranks must call it and all get the same taus.

    `val` is (domain, request) and must not be empty; drafter, embedding and head have one dtype.
    """
    mine, k, top_k = val[rank::world], drafter.cfg.num_drafts, drafter.cfg.selector_top_k
    walks = replay(drafter, embedding, head, [r for _, r in mine], k)
    found = []
    for i, ((domain, request), rounds) in enumerate(zip(mine, walks, strict=True)):
        some = NO_RECALL
        if top_k and rank + i * world < RECALLED:
            some = recall(drafter, embedding, head, request, rounds, k, top_k)
        found.append((domain, rounds, some))
    if world > 1:
        parts: list[Any] = [None] * world
        distributed.all_gather_object(parts, found)
        found = [one for part in parts for one in part]
    domains = [name for name, _ in Counter(sorted(domain for domain, *_ in found)).most_common()]
    return Taus(
        tau([rounds for _, rounds, _ in found]),
        {name: tau([rounds for domain, rounds, _ in found if domain == name]) for name in domains},
        sum((some for *_, some in found), NO_RECALL),
    )
