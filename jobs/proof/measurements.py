"""What `verify` measures on its servers: texts with and without the drafter, costs, speed."""

from dataclasses import dataclass

from dflash.agreement import tie_bound
from jobs.base.config import Config
from jobs.base.devices import served_dtype
from jobs.dataset.slices import Row
from jobs.proof.choose_k import Cost, choices, choose, measure_costs
from jobs.proof.greedy_requests import as_request
from jobs.proof.speed import speed_domain, speed_loads
from jobs.servers.server_pool import MOST, Drafts, Servers
from serving.client import Completion, Speed, compare_speeds, complete
from serving.greedy import GreedyReport, judge, read_again

READ = 4
"""How many answers are read again at the same time; each is one pass over all its tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the servers gave. `answers`: those of the server that drafts exactly `k` tokens.
    `timed`: the K by batch size at which `speeds` were measured. It is `chosen`, or where that
    drafts nothing, the K that comes nearest to paying.
    """

    k: int
    chosen: Drafts
    timed: Drafts
    answers: list[Completion]
    text: GreedyReport
    costs: list[Cost]
    speeds: list[Speed]


def measure(cfg: Config, servers: Servers, rows: list[Row], taus: dict[int, float]) -> Measured:
    """All measurements that need a server, in an order with as few server starts as possible."""
    domain = speed_domain(cfg, rows)
    narrow = [as_request(row) for row in rows if row["domain"] == domain]
    together = servers.most >= MOST
    ks = probe_ks(cfg, taus)
    servers.start([(), *ks])
    asked, at_once = [as_request(row) for row in rows], cfg.verify.concurrency
    plain = complete(servers.get(()).url, asked, at_once, "without a drafter")
    control = read_again(servers.get(()).url, plain, READ, "control")
    costs = []
    if not cfg.serve.k:  # else there is nothing to choose
        urls = {sum(k): lambda k=k: servers.get(k).url for k in [(), *ks]}
        costs = measure_costs(urls, narrow, together)
    chosen = tuple(cfg.serve.k) or choose(taus, costs)
    timed = chosen if any(chosen) else nearest(taus, costs)
    servers.keep([(), ks[-1], timed])
    servers.start([timed])  # it can start meanwhile: the next answers are not timed
    answers = complete(servers.get(ks[-1]).url, asked, at_once, "served")
    sides = (lambda: servers.get(()).url, lambda: servers.get(timed).url)
    speeds = compare_speeds(sides, speed_loads(cfg, narrow), cfg.verify.repeats, servers.most > 1)
    reading = read_again(servers.get(()).url, answers, READ, "read again")
    text = judge(plain, answers, control, reading, tie_bound(served_dtype(cfg)))
    return Measured(
        k=ks[-1][0],
        chosen=chosen,
        timed=timed,
        answers=answers,
        text=text,
        costs=costs,
        speeds=speeds,
    )


def nearest(taus: dict[int, float], costs: list[Cost]) -> Drafts:
    """The K that is slower than plain decoding by the least."""
    return (max(choices(taus, costs), key=lambda one: one.speedup).best,)


def probe_ks(cfg: Config, taus: dict[int, float]) -> list[Drafts]:
    """The K to start servers for: the largest of serve.k, else a middle one and the largest.

    Acceptance is counted on the last one. It has a single K, so that its rounds can equal replayed
    ones.
    """
    if cfg.serve.k:
        return [(max(cfg.serve.k),)]
    return [(k,) for k in sorted({max(1, max(taus) // 2), max(taus)})]
