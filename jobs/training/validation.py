"""Replay on the val split while training, and the rule that says which weights are kept."""

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
from dflash.replay import Request, replay
from jobs.dataset.slices import SHOWN


@dataclass(frozen=True)
class Taus:
    """Replayed acceptance lengths at full K: pooled over all val requests, and of each domain,
    those with the most requests first.
    """

    pooled: float
    domains: dict[str, float]

    def metrics(self) -> dict[str, float]:
        """By metric name; of domains, which may be any number, the SHOWN largest."""
        shown = list(self.domains.items())[:SHOWN]
        return {"val_tau": self.pooled} | {f"val_tau/{domain}": tau for domain, tau in shown}


@dataclass(kw_only=True)
class Choice:
    """The best weights so far: the highest tau of train.domain (empty: pooled), among those whose
    domains all keep (1 - max_slice_loss) of what the base had at step 0 (warm starts only).
    """

    tau: float = 0.0
    step: int = -1
    stale: int = 0
    """Validations since then."""
    base: dict[str, float] = field(default_factory=dict)

    def offer(self, step: int, taus: Taus, domain: str, max_slice_loss: float) -> bool:
        """Whether the weights of `step` are the new best; the base itself always qualifies."""
        score = taus.domains[domain] if domain else taus.pooled
        better = score > self.tau and not self.losers(taus, max_slice_loss)
        if better:
            self.tau, self.step = score, step
        self.stale = 0 if better else self.stale + 1
        return better

    def losers(self, taus: Taus, max_slice_loss: float) -> list[str]:
        """Domains that fell below their share of the base's tau."""
        return [d for d, tau in self.base.items() if taus.domains[d] < (1 - max_slice_loss) * tau]

    def state(self) -> dict[str, Any]:
        """For a checkpoint; `Choice(**state)` continues."""
        return asdict(self)


def as_exported(
    cfg: DrafterConfig, weights: dict[str, Tensor], stored: torch.dtype, computed: torch.dtype
) -> Drafter:
    """The drafter that `evaluate` would read from an export of these weights: rounded to the stored
    dtype, then in the one that products run in. So a val tau is the tau of what is exported.
    """
    return drafter_of(cfg, {k: cast(cast(t, stored), computed) for k, t in weights.items()})


def replay_val(
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    val: Sequence[tuple[str, Request]],
    rank: int,
    world: int,
) -> Taus:
    """Replay all val requests, each on one rank; every rank gets all taus. A collective.

    `val` is (domain, request) and must not be empty; drafter, embedding and head have one dtype.
    """
    mine = val[rank::world]
    walks = replay(drafter, embedding, head, [r for _, r in mine], drafter.cfg.num_drafts)
    found = [(domain, rounds) for (domain, _), rounds in zip(mine, walks, strict=True)]
    if world > 1:
        parts: list[Any] = [None] * world
        distributed.all_gather_object(parts, found)
        found = [pair for part in parts for pair in part]
    domains = [name for name, _ in Counter(sorted(domain for domain, _ in found)).most_common()]
    return Taus(
        tau([rounds for _, rounds in found]),
        {name: tau([rounds for domain, rounds in found if domain == name]) for name in domains},
    )
