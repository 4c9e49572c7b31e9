"""How often a right drafter is called wrong: the checks of preflight and verify, again and again.

    python -m bench.false_alarms work=runs/demo target.dtype=bfloat16
    python -m bench.false_alarms work=runs/demo evaluate.drafter=FOLDER

RUNS times a new draw of the traffic's prompts is answered by a plain server and by one with the
drafter, and the plain one reads both again; each run is judged as `flywheel verify` and `flywheel
preflight` judge theirs. The servers start once. `alarms` must be empty. Beside them stands what the
limits are made from: rates and gaps of tokens, rounds and drafts.
"""

import json
import random
import sys
from collections import Counter
from typing import Any

import torch

from bench.harness import cpu_name
from dflash.agreement import TIES, tie_bound
from jobs.comparison import compare
from jobs.config import Config, load
from jobs.console import console
from jobs.evaluate import find_drafter
from jobs.findings import Ours, check_drafts, check_text
from jobs.measure import READ, as_request
from jobs.samples import load_rows
from jobs.serve import dtype_name, served_dtype, server, vllm_version
from jobs.servers import serving
from jobs.trial import answer_of, prepare, traces, with_noise
from serving.client import complete
from serving.drafts import read_drafts
from serving.greedy import judge, read_again
from serving.server import Server

RUNS, REQUESTS = 20, 16


def main(cfg: Config) -> dict[str, Any]:
    """RUNS runs; returns what the JSON line says."""
    folder = find_drafter(cfg, cfg.evaluate.drafter)
    rows = [row for split in ("train", "val", "test") for row in load_rows(cfg, split)]
    ours = prepare(cfg, folder, rows[:1])
    path = cfg.path("logs", "false-alarms.jsonl")
    drafted = server(serving(cfg, folder, [ours.k]), "false-alarms-drafted.log")
    drafted.drafts = path
    alarms, kept = Counter(), []
    with server(serving(cfg, "", []), "false-alarms-plain.log") as plain, drafted:
        for run in range(RUNS):
            picked = random.Random(run).sample(rows, min(REQUESTS, len(rows)))
            found = one_run(cfg, ours, picked, plain, drafted)
            alarms.update(found["alarms"])
            kept.append(found)
            console.print(f"run {run + 1} of {RUNS}: {found['alarms'] or 'no alarm'}")
    return {
        "name": "false-alarms",
        "runs": RUNS,
        "alarms": dict(alarms),
        "detail": {
            "dtype": dtype_name(cfg),
            "requests": REQUESTS,
            "k": ours.k,
            "vllm": vllm_version(),
            "cpu": cpu_name(),
            "runs": kept,
        },
    }


def one_run(
    cfg: Config, ours: Ours, picked: list[dict[str, Any]], plain: Server, drafted: Server
) -> dict[str, Any]:
    """Every check on the answers to these prompts."""
    asked, at_once = [as_request(row) for row in picked], cfg.verify.concurrency
    first = complete(plain.url, asked, at_once)
    control = read_again(plain.url, first, READ, "")
    answers = complete(drafted.url, asked, at_once)
    reading = read_again(plain.url, answers, READ, "")
    text = judge(first, answers, control, reading, tie_bound(served_dtype(cfg)))
    names = [row["sample_id"] for row in picked]
    read = {answer.request_id: answer_of(ours, answer) for answer in answers}
    rounds = compare(
        ours.target,
        ours.drafter,
        list(zip(names, answers, strict=True)),
        ours.k,
        lambda one: read[one.request_id],
    )
    recorded = read_drafts(cfg.path("logs", "false-alarms.jsonl"))
    made = traces(names, answers, list(read.values()), recorded)
    ours = with_noise(cfg, find_drafter(cfg, cfg.evaluate.drafter), ours, made)
    drafts, found = check_drafts(ours, made)
    gaps = torch.cat(rounds.gaps)
    readings = [("plain", control), ("drafted", reading)]
    checks = {
        "drafts": drafts.status == "fail",
        "text": bool(text.different),
        "rounds": bool(rounds.faults()),
        "served target": check_text(list(read.values()), TIES[ours.target.dtype]).status == "fail",
    }
    return {
        "alarms": [name for name, alarm in checks.items() if alarm],
        "texts": [text.requests, text.identical, len(text.different)],
        "read_again": {name: [r.tokens, r.lost, round(r.largest, 4)] for name, r in readings},
        "rounds": [rounds.rounds, len(rounds.differences), rounds.identical],
        "round_gaps": [round(d.gap, 4) for d in rounds.differences],
        "tau": [rounds.summary()["tau_replay"], rounds.summary()["tau_served"]],
        "drafts": [found["drafts"], len(found["near_ties"]), found["different"]],
        "own_noise": [
            ours.noise.drafts,
            len(ours.noise.mismatches),
            ours.noise.beyond(ours.ties),
        ],
        "draft_gaps": [
            round(m["gap"] / m["largest"], 4) for m in found["near_ties"] + found["differences"]
        ],
        "token_gaps": [round(float(g), 4) for g in gaps[gaps > 0]],
        "tokens": len(gaps),
    }


if __name__ == "__main__":
    print(json.dumps(main(load(None, sys.argv[1:]))))
