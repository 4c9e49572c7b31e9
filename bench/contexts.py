"""make bench-contexts: the demo's drafter, trained on short prompts, adapts to long ones.

A long prompt is one of the demo's prompts after EARLIER others with the target's own answers. The
drafter is trained on long prompts, with and without a replay mix of the short ones, and scored by
replay on held-out conversations of both. Needs a finished demo. It takes half an hour on two cores
and continues after Ctrl-C. Ends with <work>/contexts/contexts.json and one JSON line. `ratio` is
tau on long prompts after adaptation with the mix over tau before it.
"""

import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from bench.harness import cpu_name, report
from jobs import evaluate, harvest, ingest, select, traffic, train
from jobs.base.cluster import cluster
from jobs.base.config import Config, load
from jobs.base.console import print_table
from jobs.demo_data.prompts import Prompt, prompts
from jobs.evaluation import drafters
from store.place import read_json, write_json

LONG, EARLIER, CONVERSATIONS = "long", 8, 150
RECIPES = {"no mix": [], "mix 0.5": ["train.mix=0.5"]}
SETTINGS = [
    "train.steps=120",
    "train.val_every=60",
    "train.lr=1e-2",
    f"train.domain={LONG}",
    "train.max_slice_loss=1",
]


def main() -> None:
    """Collect, adapt, score; print the JSON line."""
    demo = load(None, sys.argv[1:])
    work = demo.path("contexts")
    shared = [*sys.argv[1:], f"target.path={demo.target_path}", f"work={work}"]
    shared += [f"ingest.logs={demo.path('capture')},{work / 'capture'}"]
    cfg = load(None, shared)
    base = drafters.find_drafter(demo, demo.evaluate.drafter)
    traffic.send(cfg, long_prompts(demo))
    with cluster(cfg):
        ingest.run(cfg)
        select.run(cfg)
        harvest.run(cfg)
        found = {"base": score(cfg, base)}
        for name, more in RECIPES.items():
            ours = load(None, [*shared, *SETTINGS, f"train.base={base}", *more])
            found[name] = score(ours, Path(train.run(ours)["folder"]))
    finish(cfg, found)


def long_prompts(demo: Config) -> list[Prompt]:
    """Tickets that the demo has not seen, each after EARLIER tickets and their answers."""
    asked = {p.conversation_id: p for p in prompts("tickets", demo.demo.tickets, demo.demo.seed)}
    given = answers(demo)
    known = [(asked[name], text) for name, text in sorted(given.items()) if name in asked]
    new = prompts("tickets", CONVERSATIONS, demo.demo.seed + 1)
    rng = random.Random(demo.demo.seed)
    return [after(rng.sample(known, EARLIER), prompt) for prompt in new]


def answers(demo: Config) -> dict[str, str]:
    """The target's answer in every conversation that the demo captured."""
    tokenizer = AutoTokenizer.from_pretrained(demo.target_path, local_files_only=True)
    found = {}
    for path in sorted(demo.path("capture").glob("[!.]*.jsonl")):
        for line in map(json.loads, path.read_bytes().splitlines()):
            text = tokenizer.decode(line["output_ids"], skip_special_tokens=True)
            found[line["conversation_id"]] = text
    return found


def after(earlier: list[tuple[Prompt, str]], prompt: Prompt) -> Prompt:
    """The prompt as the last turn of a conversation."""
    turns = [
        message
        for before, answer in earlier
        for message in (before.messages[-1], {"role": "assistant", "content": answer})
    ]
    messages = [*prompt.messages[:-1], *turns, prompt.messages[-1]]
    return Prompt(f"{LONG}-{prompt.conversation_id}", LONG, messages)


def score(cfg: Config, drafter: Path) -> dict[str, float]:
    """Replayed tau by domain."""
    evaluation = read_json(cfg.place("evaluations"), f"{drafter.name}.json")
    if evaluation is None:
        evaluation = evaluate.run(cfg.override("evaluate", drafter=str(drafter)))
    return evaluation["tau"]["domains"]


def finish(cfg: Config, found: dict[str, dict[str, float]]) -> None:
    """Print the table and the JSON line; write contexts.json."""
    lengths = [
        len(json.loads(line)["prompt_ids"])
        for path in cfg.path("capture").glob("[!.]*.jsonl")
        for line in path.read_bytes().splitlines()
    ]
    detail: dict[str, Any] = {"cpu": cpu_name(), "prompt_tokens": statistics.median(lengths)}
    detail |= {"tau": found}
    write_json(cfg.place(), "contexts.json", detail)
    names = sorted(found["base"])
    rows = [[recipe, *(taus[name] for name in names)] for recipe, taus in found.items()]
    print_table("Replayed tau", ["recipe", *names], rows)
    ratio = found["mix 0.5"][LONG] / found["base"][LONG]
    report("contexts", [ratio], "tau on long prompts adapted / before", detail)


if __name__ == "__main__":
    main()
