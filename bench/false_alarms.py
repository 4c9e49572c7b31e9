"""How often a right drafter is called wrong, by those checks of preflight and verify that rounding
can affect: texts, rounds, drafts, served tokens.

    python -m bench.false_alarms work=runs/demo target.dtype=bfloat16
    python -m bench.false_alarms work=runs/demo evaluate.drafter=FOLDER

RUNS times REQUESTS new prompts of the demo's clients (another seed) are answered by a plain server
and by one with the drafter. The plain server then reads both answers again. Each run has its own
prompts and is judged as `flywheel verify` and `flywheel preflight` do it. `alarms` must be empty.
`detail` has the numbers that the limits are based on: tokens, rounds and drafts that differ, and
their gaps. bench/missed_faults.py tests the opposite error.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.harness import cpu_name
from dflash.agreement import TIES, tie_bound
from dflash.diagnose import Answer, Trace
from jobs.base.config import Config, load
from jobs.base.console import console
from jobs.base.devices import dtype_name, served_dtype
from jobs.base.packages import vllm_version
from jobs.dataset.samples import load_rows
from jobs.evaluation.drafters import find_drafter
from jobs.proof.engine_checks import Ours, check_drafts, check_text
from jobs.proof.measurements import READ
from jobs.proof.preflight_run import answer_of, prepare, traces, with_noise
from jobs.proof.round_comparison import compare
from jobs.servers.configured import server
from jobs.servers.server_pool import serving
from jobs.traffic import as_request, demo_prompts
from serving.client import Completion, Request, complete
from serving.drafts import read_drafts
from serving.greedy import Reading, judge, read_again

RUNS, REQUESTS = 20, 16
GENERAL = 4
"""One in GENERAL prompts is of the broad domain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Answers to the same prompts: as the servers gave them, and as our target computes them."""

    names: list[str]
    plain: list[Completion]
    drafted: list[Completion]
    control: Reading
    reading: Reading
    answers: list[Answer]
    traces: list[Trace]

    def draw(self, picked: list[int]) -> "Pool":
        """The pool of the prompts at these indices."""
        each = {
            name: [getattr(self, name)[i] for i in picked]
            for name in ("names", "plain", "drafted", "answers", "traces")
        }
        return Pool(
            **each,
            control=Reading(gaps=[self.control.gaps[i] for i in picked]),
            reading=Reading(gaps=[self.reading.gaps[i] for i in picked]),
        )


def main(cfg: Config) -> dict[str, Any]:
    """Judge RUNS times; returns the content of the JSON line."""
    folder = find_drafter(cfg, cfg.evaluate.drafter)
    ours = prepare(cfg, folder, load_rows(cfg, cfg.evaluate.split)[:1])
    pool = ask(cfg, ours, str(folder), new_requests(cfg, RUNS * REQUESTS))
    alarms, noise = Counter(), Counter()
    for run in range(RUNS):
        part = pool.draw(list(range(run * REQUESTS, (run + 1) * REQUESTS)))
        own = with_noise(cfg, folder, ours, part.traces)
        found = [name for name, alarm in judged(cfg, own, part).items() if alarm]
        alarms.update(found)
        noise.update(drafts=own.noise.drafts, turned=len(own.noise.mismatches))
        noise.update(beyond=own.noise.beyond(ours.ties))
        console.print(f"run {run + 1} of {RUNS}: {', '.join(found) or 'no alarm'}")
    about = {"dtype": dtype_name(cfg), "requests": REQUESTS, "k": ours.k, "vllm": vllm_version()}
    return {
        "name": "false-alarms",
        "runs": RUNS,
        "alarms": dict(alarms),
        "detail": about
        | {"cpu": cpu_name(), "pool": described(ours, pool), "own_noise": dict(noise)},
    }


def new_requests(cfg: Config, count: int) -> list[Request]:
    """`count` prompts of the demo's clients, from a seed that the demo does not use."""
    more = count + count // 5
    asked = {"tickets": more - more // GENERAL, "general": more // GENERAL}
    fresh = demo_prompts(cfg.override("demo", seed=cfg.demo.seed + 1, **asked))
    known = {prompt.messages[-1]["content"] for prompt in demo_prompts(cfg)}
    unknown = [prompt for prompt in fresh if prompt.messages[-1]["content"] not in known]
    return [as_request(prompt, cfg) for prompt in unknown[:count]]


def ask(cfg: Config, ours: Ours, folder: str, asked: list[Request]) -> Pool:
    """The answers of a plain and of a drafting server to these prompts."""
    at_once = cfg.verify.concurrency
    drafting = server(serving(cfg, folder, [ours.k]), "false-alarms-drafted.log")
    drafting.drafts = cfg.path("server_logs", "false-alarms.drafts")
    with drafting:
        drafted = complete(drafting.url, asked, at_once, "with the drafter")
    with server(serving(cfg, "", []), "false-alarms-plain.log") as running:
        plain = complete(running.url, asked, at_once, "without a drafter")
        control = read_again(running.url, plain, READ, "control")
        reading = read_again(running.url, drafted, READ, "read again")
    names = [str(one.conversation) for one in asked]
    answers = [answer_of(ours, one) for one in drafted]
    return Pool(
        names=names,
        plain=plain,
        drafted=drafted,
        control=control,
        reading=reading,
        answers=answers,
        traces=traces(names, drafted, answers, read_drafts(drafting.drafts)),
    )


def judged(cfg: Config, ours: Ours, pool: Pool) -> dict[str, bool]:
    """Which checks of a right drafter fail on these answers."""
    ties = tie_bound(served_dtype(cfg))
    text = judge(pool.plain, pool.drafted, pool.control, pool.reading, ties)
    return {
        "text": bool(text.different),
        "rounds": bool(rounds_of(ours, pool).faults()),
        "drafts": check_drafts(replace(ours, table=ours.table[:1]), pool.traces)[0].status
        == "fail",
        "served target": check_text(pool.answers, ours.ties).status == "fail",
    }


def rounds_of(ours: Ours, pool: Pool) -> Any:
    """The comparison of rounds, on answers whose features are computed already."""
    read = {one.request_id: a for one, a in zip(pool.drafted, pool.answers, strict=True)}
    named = list(zip(pool.names, pool.drafted, strict=True))
    return compare(ours.target, ours.drafter, named, ours.k, lambda one: read[one.request_id])


def described(ours: Ours, pool: Pool) -> dict[str, Any]:
    """The numbers that the limits are based on, over the whole pool."""
    text = judge(pool.plain, pool.drafted, pool.control, pool.reading, 0.0)
    rounds, (_, drafts) = (
        rounds_of(ours, pool),
        check_drafts(replace(ours, table=ours.table[:1]), pool.traces),
    )
    gaps, ties = torch.cat([a.gaps for a in pool.answers]), TIES[ours.target.dtype]
    return {
        "texts": {"requests": text.requests, "identical": text.identical},
        "read_again": {
            name: {"tokens": r.tokens, "lost": r.lost, "largest": round(r.largest, 4)}
            for name, r in (("plain", pool.control), ("drafted", pool.reading))
        },
        "served_tokens": {
            "tokens": len(gaps),
            "ties": int(((gaps > 0) & (gaps < ties)).sum()),
            "wrong": int((gaps >= ties).sum()),
            "largest": float(gaps.max()),
        },
        "rounds": {k: v for k, v in rounds.summary().items() if k != "differences"},
        "round_gaps": sorted(round(d.gap / d.bound, 3) for d in rounds.differences),
        "drafts": {n: drafts[n] for n in ("drafts", "different")}
        | {"near_ties": len(drafts["near_ties"])},
    }


if __name__ == "__main__":
    print(json.dumps(main(load(None, sys.argv[1:]))))
