"""flywheel traffic

Simulated clients of the demo: serve the target without a drafter, send seeded prompts of two
domains, and let the capture write requests and answers to <work>/capture. Prompts whose
conversation is already captured are not sent again.
"""

import json
import random
from pathlib import Path
from typing import Any

from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import print_table
from jobs.demo_data.prompts import Prompt, prompts
from jobs.servers.configured import server
from serving.client import Request, complete


def run(cfg: Config) -> dict[str, Any]:
    """Send the prompts that are not captured yet; returns requests, tokens, tokens per second."""
    return send(cfg, demo_prompts(cfg))


def send(cfg: Config, wanted: list[Prompt]) -> dict[str, Any]:
    """As `run`, for any prompts."""
    folder = cfg.path("capture")
    known = captured(folder)
    missing = [p for p in wanted if p.conversation_id not in known]
    summary = {"stage": "traffic", "requests": len(missing), "reused": len(wanted) - len(missing)}
    if missing:
        serving = cfg.override(
            "serve",
            port=0,
            drafter="",
            capture=str(folder),
            max_num_seqs=cfg.demo.concurrency,
        )
        with server(serving, "traffic.log") as running:
            answers = complete(
                running.url,
                [as_request(p, cfg) for p in missing],
                cfg.demo.concurrency,
                "traffic",
            )
        tokens = sum(len(a.output_ids) for a in answers)
        span = max(a.started + a.seconds for a in answers) - min(a.started for a in answers)
        summary |= {"output_tokens": tokens, "tokens_per_second": tokens / span}
    print_table("Traffic", list(summary)[1:], [list(summary.values())[1:]])
    return summary


def demo_prompts(cfg: Config) -> list[Prompt]:
    """All simulated requests, with the domains in random order."""
    found = [
        *prompts("tickets", cfg.demo.tickets, cfg.demo.seed),
        *prompts("general", cfg.demo.general, cfg.demo.seed),
    ]
    random.Random(cfg.demo.seed).shuffle(found)
    return found


def as_request(prompt: Prompt, cfg: Config) -> Request:
    """A greedy request, labelled with its conversation and domain."""
    return Request(
        prompt=prompt.messages,
        max_tokens=cfg.demo.max_tokens,
        conversation=prompt.conversation_id,
        domain=prompt.domain,
    )


def captured(folder: Path) -> set[str]:
    """Ids of the conversations in the capture files; truncated and foreign lines are skipped."""
    found = set()
    for path in sorted(folder.glob("[!.]*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            name = record.get("conversation_id") if isinstance(record, dict) else None
            if isinstance(name, str):
                found.add(name)
    return found


if __name__ == "__main__":
    run_as_module("traffic")
