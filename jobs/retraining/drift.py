"""Whether a domain's drafts are accepted less than before, and whether only the mix has changed.

Compared are the newest `short` requests of a domain with the `long` ones before, all drafted by the
same drafter, by their tokens per round at the same mix of offered positions
(jobs/reconciling/sequential.py). So neither a K that falls with the load nor another share of the
domains looks like drift. docs/decisions/047 has the errors of this test, from bench/drift.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from jobs.base.config import Config
from jobs.dataset.database import open_database
from jobs.reconciling.evidence import MOST_K
from jobs.reconciling.sequential import FEWEST, Ratio, Side, positions, tokens_per_round
from jobs.retraining.policy import Drift

LOOKS = 8
"""Earlier looks that are repeated, half a `short` apart: what fired then decides whether it still
fires. So the memory of the test is the data, and no file has to be kept."""
MOST_SLICES = 20
"""Domains that are looked at: those with the most requests. Clients choose domains."""

# A clock may be wrong, but no request ended after it was ingested.
SERVED = """
with served as (
    select
        domain,
        coalesce(conversation_id, request_id) as conversation,
        accepted,
        drafted,
        request_id,
        least(coalesce(finished_at, ingested_at), coalesce(ingested_at, finished_at)) as seen
    from acceptance_rows left join logs_rows using (log)
    where
        log is not null
        and origin = 'served'
        and acceptance_rows.target_id = $target_id
        and drafter_version = $drafter
        and len(accepted) > 0
),

largest as (
    select domain from served group by domain order by count(*) desc, domain limit $slices
),

placed as (
    select *, row_number() over (partition by domain order by seen desc, request_id) as place
    from served semi join largest using (domain)
)

select domain, conversation, accepted, drafted
from placed
where place <= $most
order by seen, request_id
"""


@dataclass(frozen=True, slots=True)
class Request:
    """A served request: `tried`, `passed`, `offered` by position, as in sequential.positions."""

    slice: str
    conversation: str
    tried: list[int]
    passed: list[int]
    offered: list[int]
    rounds: int


@dataclass(frozen=True, slots=True)
class Found:
    """What is seen of one domain. `change`: of tokens per round, as a share, with its interval;
    None with too few requests.
    """

    slice: str
    requests: int
    fires: bool
    change: float | None = None
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class Mixed:
    """How tokens per round changed over all domains, as shares: `mix` by other shares of the
    domains, `within` by what changed inside them. `shares`: of the rounds, before and now.
    """

    mix: float
    within: float
    shares: dict[str, tuple[float, float]]


def request_of(name: str, conversation: str, accepted: list[int], drafted: list[int]) -> Request:
    """One request from its rounds."""
    offered, tried, passed = positions(accepted, drafted, MOST_K)
    return Request(name, conversation, tried, passed, offered, len(accepted))


def served_requests(cfg: Config, target_id: str, drafter: str, limits: Drift) -> list[Request]:
    """The newest requests of each domain that production drafted with this drafter, in order."""
    most = limits.long + limits.short + LOOKS * (limits.short // 2)
    parameters = {"target_id": target_id, "drafter": drafter, "slices": MOST_SLICES, "most": most}
    with open_database(cfg, {"acceptance": None, "logs": None}) as connection:
        rows = connection.execute(SERVED, parameters).fetchall()
    return [request_of(*row) for row in rows]


def find_drift(requests: Sequence[Request], limits: Drift) -> list[Found]:
    """Every domain, by name. `requests` are in order of time."""
    slices: dict[str, list[Request]] = {}
    for one in requests:
        slices.setdefault(one.slice, []).append(one)
    level = limits.error / max(1, len(slices))
    reach = NormalDist().inv_cdf(1 - level)
    return [_look(name, slices[name], limits, reach) for name in sorted(slices)]


def _look(name: str, requests: list[Request], limits: Drift, reach: float) -> Found:
    """Repeat the last looks at one domain; the latest is the answer."""
    step, fires, found = limits.short // 2, False, Found(name, len(requests), False)
    if not limits.fall:
        return found
    for back in range(LOOKS, -1, -1):
        end = len(requests) - back * step
        if end < 2 * limits.short:
            continue
        split = end - limits.short
        ratio = compared(requests[max(0, split - limits.long) : split], requests[split:end])
        if ratio is None or min(ratio.conversations) < FEWEST:
            found = Found(name, len(requests), False)
            continue
        change, half = float(np.expm1(ratio.value)), reach * ratio.error
        low, high = float(np.expm1(ratio.value - half)), float(np.expm1(ratio.value + half))
        fires = change <= -limits.recovered if fires else change <= -limits.fall and high < 0
        found = Found(name, len(requests), fires, change, low, high)
    return found


def compared(before: Sequence[Request], now: Sequence[Request]) -> Ratio | None:
    """The logarithm of tokens per round now over before; None where nothing can be compared."""
    return tokens_per_round(_side(now), _side(before))


def _side(requests: Sequence[Request]) -> Side:
    rows: dict[str, int] = {}
    where = [rows.setdefault(one.conversation, len(rows)) for one in requests]
    tried, passed = (np.zeros((len(rows), MOST_K)) for _ in range(2))
    np.add.at(tried, where, np.array([one.tried for one in requests], np.float64))
    np.add.at(passed, where, np.array([one.passed for one in requests], np.float64))
    offered = np.array([one.offered for one in requests], np.float64).sum(0)
    return Side(tried, passed, offered, sum(one.rounds for one in requests))


def find_mix(requests: Sequence[Request], limits: Drift) -> Mixed | None:
    """Over all domains: the newest `short` requests against the `long` before; None with fewer than
    twice `short`.
    """
    if len(requests) < 2 * limits.short:
        return None
    split = len(requests) - limits.short
    before, now = requests[max(0, split - limits.long) : split], requests[split:]
    names = sorted({one.slice for one in (*before, *now)})
    mix = within = total = 0.0
    shares = {name: (_share(before, name), _share(now, name)) for name in names}
    for name in names:
        then, here = ([one for one in part if one.slice == name] for part in (before, now))
        tau = _tau(then or here)  # a domain that is new changes the mix and nothing else
        ratio = compared(then, here) if then and here else None
        old, new = shares[name]
        mix += (new - old) * tau
        within += new * tau * (np.expm1(ratio.value) if ratio else 0.0)
        total += old * tau
    return Mixed(float(mix / total), float(within / total), shares)


def _share(requests: Sequence[Request], name: str) -> float:
    rounds = sum(one.rounds for one in requests)
    return sum(one.rounds for one in requests if one.slice == name) / rounds


def _tau(requests: Sequence[Request]) -> float:
    rounds = sum(one.rounds for one in requests)
    return 1 + sum(sum(one.passed) for one in requests) / rounds
