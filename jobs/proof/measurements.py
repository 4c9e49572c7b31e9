"""What the servers of `verify` are asked: texts with and without the drafter, costs, speed."""

from dataclasses import dataclass
from typing import Any

from dflash.agreement import tie_bound
from jobs.base.config import Config
from jobs.base.console import console, some_names
from jobs.base.target_facts import none_of_target
from jobs.evaluate import domains
from jobs.fleet.server_pool import Drafts, Servers
from jobs.proof.choose_k import Cost, choose, measure_costs
from jobs.serve import served_dtype
from serving.client import Completion, Request, Speed, compare_speeds, complete
from serving.greedy import GreedyReport, judge, read_again

Row = dict[str, Any]
RULE = "served text, plain answers read again"
"""How drafters are judged, a part of what identifies a result: another rule measures again."""
MOST = 3
"""Servers that are of use at the same time: without a drafter, at the largest K, at another."""
READ = 4
"""Answers that are read again at the same time: each is one pass over all its tokens."""
PLAIN = {"repetition_penalty": 1.0, "min_p": 0.0}
"""Said in every request: a target's generation_config.json may make a penalty the default."""
UNSTEADY = 1.3
"""Ratio of the fastest to the slowest plain pass above which the machine was not quiet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the servers gave. `answers`: of the drafting one at `k` alone."""

    k: int
    chosen: Drafts
    answers: list[Completion]
    text: GreedyReport
    costs: list[Cost]
    speeds: list[Speed]


def measure(cfg: Config, servers: Servers, rows: list[Row], taus: dict[int, float]) -> Measured:
    """Everything that needs a server, in an order that starts each one as rarely as can be."""
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
    servers.keep([(), ks[-1], chosen])
    servers.start([chosen])  # while the proof runs, which is not timed
    answers = complete(servers.get(ks[-1]).url, asked, at_once, "served")
    sides = (lambda: servers.get(()).url, lambda: servers.get(chosen).url)
    speeds = compare_speeds(sides, speed_loads(cfg, narrow), cfg.verify.repeats, servers.most > 1)
    reading = read_again(servers.get(()).url, answers, READ, "read again")
    text = judge(plain, answers, control, reading, tie_bound(served_dtype(cfg)))
    return Measured(
        k=ks[-1][0], chosen=chosen, answers=answers, text=text, costs=costs, speeds=speeds
    )


def speed_loads(cfg: Config, narrow: list[Request]) -> dict[int, list[Request]]:
    """Speed is measured at concurrency 1 and 8 on the first of these, a quarter as many at 1."""
    return {1: narrow[: (cfg.verify.requests + 3) // 4], 8: narrow[: cfg.verify.requests]}


def speed_domain(cfg: Config, rows: list[Row]) -> str:
    """verify.domain, else the one with the most held-out samples. ValueError if it has none."""
    names = domains(rows)
    if not names:
        what = f"greedy {cfg.evaluate.split} sample of more than one token"
        fix = "send some requests with temperature 0, or set evaluate.split"
        raise none_of_target(cfg, what, fix)
    if not cfg.verify.domain:
        return max(names, key=[row["domain"] for row in rows].count)
    if cfg.verify.domain not in names:
        raise ValueError(
            f"no held-out sample of domain {cfg.verify.domain!r} (verify.domain): "
            f"there are {some_names(names)}"
        )
    return cfg.verify.domain


def as_request(row: Row) -> Request:
    """The recorded prompt as token ids, with room for the recorded answer, asked for greedily.

    Whatever shaped or sampled the recorded answer, this one is the target's plain choice.
    Its labels stay here: nothing captures these requests, and not every text can be a header.
    """
    return Request(
        prompt=list(row["prompt_ids"]), max_tokens=len(row["output_ids"]), extra=dict(PLAIN)
    )


def probe_ks(cfg: Config, taus: dict[int, float]) -> list[Drafts]:
    """The K to start servers for: the largest of serve.k, else a middle one and the largest.

    Acceptance is counted at the last, at one K, so that served rounds can be replayed rounds.
    """
    if cfg.serve.k:
        return [(max(cfg.serve.k),)]
    return [(k,) for k in sorted({max(1, max(taus) // 2), max(taus)})]


def pooled_by_vllm(answers: list[Completion]) -> float:
    """VLLM's own pooled figure, drafts behind the end of text included."""
    specs = [a.spec for a in answers if a.spec]
    steps = sum(s["num_spec_steps"] for s in specs)
    return 1 + sum(s["num_accepted_draft_tokens"] for s in specs) / steps


def warn_if_unsteady(stage: str, speeds: list[Row]) -> None:
    """Say so where the passes of the plain server differ too much for ratios to mean something."""
    for s in speeds:
        if max(s["plain"]) > UNSTEADY * min(s["plain"]):
            console.print(
                f"at concurrency {s['concurrency']} the plain server gave "
                f"{min(s['plain']):.0f} to {max(s['plain']):.0f} tokens/s: the machine was busy "
                f"with something else, so these ratios mean little; run `flywheel {stage}` again",
                style="yellow",
            )
