"""flywheel regenerate [--plan] [regenerate.tokens=1000000] [regenerate.sampler=greedy]

Prompts that a former target answered, and those of text logs, answered anew by the present target
-> <work>/regenerated, logs that `flywheel ingest` reads. A drafter must learn from what the present
target says; what users asked stays worth knowing.

One vLLM server of the present target answers, as `serve` configures it. Prompts go to it as token
ids where tokenizer and template did not change, else as chat messages for its own template. An
interrupted run goes on after the last BATCH of answers.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.dataset.slices import largest_rows
from jobs.regeneration import kept_tokenizers, new_answers
from jobs.regeneration.former_prompts import LEFT_OUT, Asking, Row, former_prompts
from jobs.regeneration.text_prompts import text_prompts
from jobs.servers.configured import server
from serving.client import Completion, Request, complete_each
from store.lease import Lease, lease

BATCH = 256
"""Prompts of one log. What is lost when a run is interrupted is at most this many answers."""
FINISHED = {
    "stop": "to its end",
    "length": "cut at regenerate.max_tokens",
    "repetition": "it was a loop, cut after its first pass",
}


def plan(cfg: Config) -> dict[str, Any]:
    """Which prompts `run` would ask, by domain; writes nothing."""
    todo = waiting(cfg)
    domains = _by_domain(todo)
    title = "Prompts of former targets and text logs, to be answered anew"
    rows = largest_rows({name: [*counts.values()] for name, counts in domains.items()})
    print_table(title, ["domain", "prompts", "tokens of their former answers"], rows)
    return {"stage": "regenerate", "prompts": len(todo), "domains": domains}


def waiting(cfg: Config) -> list[Row]:
    """Rows of the prompts that are still to be answered anew. Those of former targets come first;
    those of text logs get what is left of regenerate.tokens.
    """
    todo = former_prompts(cfg)
    todo += text_prompts(cfg, cfg.regenerate.tokens - sum(row["output_tokens"] for row in todo))
    known = new_answers.asked_already(cfg) if todo else set()
    return [row for row in todo if row["sample_id"] not in known]


def run(cfg: Config) -> dict[str, Any]:
    """Ask every waiting prompt; returns counts of answers by finish reason, and of prompts that
    were left out, by reason.
    """
    with lease(cfg.place("leases", "regenerate")) as held:
        todo = waiting(cfg)
        if not todo:
            console.print("no prompt of a former target or a text log waits for an answer")
            return {"stage": "regenerate", "prompts": 0, "answers": 0}
        if cfg.regenerate.former:
            kept_tokenizers.keep(cfg, Path(cfg.regenerate.former))
        asking = Asking(cfg, (row["target_id"] for row in todo))
        asked = list(asking.requests(todo))
        # A tokenizer may still be named or repaired; nothing else changes.
        open_yet = ("no_tokenizer", "unreadable")
        final = {name: why for name, why in asking.left_out.items() if why not in open_yet}
        new_answers.keep(cfg, [], final)
        left_out = Counter(asking.left_out.values())
        finished = _ask(cfg, asked, left_out, held) if asked else Counter()
    return _show(len(todo), finished, left_out)


def _ask(
    cfg: Config, asked: list[tuple[Row, Request]], left_out: Counter[str], held: Lease
) -> Counter[str]:
    """Answers by finish reason; every batch is kept before the next one is asked."""
    finished: Counter[str] = Counter()
    serving = cfg.override("serve", port=0, drafter="", capture="")
    with server(serving, "regenerate.log") as running:
        for start in range(0, len(asked), BATCH):
            part = asked[start : start + BATCH]
            label = f"prompts {start + 1} to {start + len(part)} of {len(asked)}"
            requests = [request for _, request in part]
            found = complete_each(running.url, requests, cfg.serve.max_num_seqs, label)
            good: list[tuple[Row, Completion]] = []
            aside: dict[str, str] = {}
            for (row, _), answer in zip(part, found, strict=True):
                if not isinstance(answer, Completion):
                    aside[row["sample_id"]] = "refused"
                elif not answer.output_ids:
                    aside[row["sample_id"]] = "empty"
                else:
                    good.append((row, answer))
            held.check()
            new_answers.keep(cfg, good, aside)
            finished.update(answer.finish_reason for _, answer in good)
            left_out.update(aside.values())
    return finished


def _show(prompts: int, finished: Counter[str], left_out: Counter[str]) -> dict[str, Any]:
    rows = [["answered", FINISHED.get(name, name), count] for name, count in finished.most_common()]
    rows += [["left out", LEFT_OUT[name], count] for name, count in left_out.most_common()]
    print_table("Prompts answered anew", ["", "why", "prompts"], rows)
    if finished:
        console.print("`flywheel ingest` makes samples of the answers")
    return {
        "stage": "regenerate",
        "prompts": prompts,
        "answers": finished.total(),
        "finish_reasons": dict(finished),
        "left_out": dict(left_out),
    }


def _by_domain(rows: list[Row]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        known = found.setdefault(row["domain"], {"prompts": 0, "tokens": 0})
        known["prompts"] += 1
        known["tokens"] += row["output_tokens"]
    return found


if __name__ == "__main__":
    run_as_module("regenerate")
