"""make bench-adapt: a drafter of three domains adapts to a fourth, with 10k, 30k and 100k tokens.

Trains all weights or LoRA, with and without a replay mix of the old domains. Each result is scored
by replay on the same held-out conversations of every domain. It takes two hours on two cores and
continues after Ctrl-C. Ends with <work>/adapt.json, <work>/adapt.svg and one JSON line. `ratio` is
tau on the new domain after 100k tokens over tau of the base: for the best recipe that keeps every
old domain within 1 %, or, if none does, for the one that loses least.
"""

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.domains import prompts as more_prompts
from bench.harness import cpu_name, report
from jobs import evaluate, harvest, ingest, select, target, traffic, train
from jobs.base.cluster import cluster
from jobs.base.config import Config, load
from jobs.base.console import print_table
from jobs.demo_data.prompts import Prompt, prompts
from jobs.training.states import read_result
from store.files import commit
from store.ids import split_of
from store.place import place_of, read_json, write_json

OLD, NEW = ("tickets", "general", "reviews"), "sql"
PROMPTS = {"tickets": 160, "general": 85, "reviews": 200, NEW: 2700}
HELD_OUT_PROMPTS = 1118
"""Only among so many first prompts of the new domain are some held out. Of later ones only the
training split is used. So a study with more prompts is scored on the same conversations."""
SIZES = {10_000: 60, 30_000: 140, 100_000: 300}
"""Answer tokens of the new domain -> training steps."""
BASE = ["train.steps=300", "train.val_every=100"]
MIX = 0.5
FULL = ["train.lr=1e-2"]
LORA = ["train.lora_rank=16", "train.optimizer=adamw", "train.lr=5e-3"]
RECIPES = {
    "all weights, no mix": FULL,
    "all weights, mix": [*FULL, f"train.mix={MIX}"],
    "LoRA, no mix": LORA,
    "LoRA, mix": [*LORA, f"train.mix={MIX}"],
}


@dataclass(frozen=True)
class Study:
    """The work folders of a study, below one folder and with one target; the user's settings."""

    folder: Path
    settings: list[str]

    def config(self, name: str, *more: str) -> Config:
        """The configuration of the work folder `name`, which shares the target with the others."""
        shared = [f"work={self.folder / name}", f"target.path={self.folder / 'all' / 'target'}"]
        shared += ["drafter.draft_vocab=0"]  # the new domain has words that the old ones lack
        defaults = ["ingest.val_percent=4", "ingest.test_percent=8", "train.val_samples=8"]
        # As when the study of docs/explanation/adaptation.md began.
        defaults += ["demo.max_tokens=96", "train.weights=decay"]
        return load(None, [*defaults, *self.settings, *shared, *more])


def main() -> None:
    """Collect, train the base, adapt, evaluate; print the JSON line."""
    given = [word for word in sys.argv[1:] if not word.startswith("work=")]
    [work] = [word.removeprefix("work=") for word in sys.argv[1:] if word not in given] or [
        "runs/adapt"
    ]
    study = Study(Path(work).absolute(), given)
    lines = collect(study)
    with cluster(study.config("all")):
        for name, size in {"base": 0, **{f"{n}": n for n in SIZES}}.items():
            share(study, name, lines, size)
        base = train.run(study.config("base", *BASE))
        found = [score(study, "base", base, recipe="base", tokens=0)]
        for size, steps in SIZES.items():
            for recipe, settings in RECIPES.items():
                common = [f"train.base={base['folder']}", f"train.domain={NEW}"]
                common += [f"train.steps={steps}", f"train.val_every={steps // 2}"]
                cfg = study.config(str(size), *common, "train.max_slice_loss=1", *settings)
                found.append(score(study, str(size), train.run(cfg), recipe, size))
    finish(study, found)


def collect(study: Study) -> list[dict[str, Any]]:
    """Let the target answer all prompts and harvest them; returns the captured records."""
    cfg = study.config("all", f"target.path={study.folder / 'all' / 'target'}")
    target.run(cfg.override("target", path=""))
    traffic.send(cfg, [p for domain, count in PROMPTS.items() for p in ask(domain, count)])
    with cluster(cfg):
        ingest.run(cfg)
        select.run(cfg)
        harvest.run(cfg)
    paths = sorted(cfg.path("capture").glob("[!.]*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]


def ask(domain: str, count: int) -> list[Prompt]:
    """Prompts of the demo or of bench/domains.py."""
    return (prompts if domain in ("tickets", "general") else more_prompts)(domain, count, seed=0)


def share(study: Study, name: str, lines: list[dict[str, Any]], tokens: int) -> None:
    """Make a work folder with the old domains, `tokens` training tokens of the new one, and all
    held-out conversations of both. Its features are a link to those of the folder `all`.
    """
    cfg = study.config(name)
    cfg.path("capture").mkdir(parents=True, exist_ok=True)
    for made in ("features", "feature_index", "set_aside"):
        if not cfg.path(made).is_symlink():
            os.symlink(study.folder / "all" / made, cfg.path(made))
    kept, used = [], 0
    for line in sorted(lines, key=lambda line: line["conversation_id"]):
        shares = (cfg.ingest.val_percent, cfg.ingest.test_percent)
        training = split_of(line["conversation_id"], *shares) == "train"
        if line["domain"] == NEW and training:
            if used >= tokens:
                continue
            used += len(line["output_ids"])
        elif line["domain"] == NEW and number(line) >= HELD_OUT_PROMPTS:
            continue
        kept.append(json.dumps(line))
    if used < tokens:
        raise ValueError(f"only {used} training tokens of {NEW}, not {tokens}: raise PROMPTS")
    text = "\n".join(kept).encode() + b"\n"
    subset = cfg.path("capture", "subset.jsonl")
    if not subset.is_file() or subset.read_bytes() != text:
        for made in (
            "traffic",
            "rejects",
            "logs",
            "selection",
        ):  # else ingest keeps samples of the former subset
            shutil.rmtree(cfg.path(made), ignore_errors=True)
        commit(subset, lambda stream: stream.write(text))
    ingest.run(cfg)
    select.run(cfg)


def number(line: dict[str, Any]) -> int:
    """The number of the line's prompt among those of its domain."""
    return int(line["conversation_id"].rpartition("-")[2])


def score(
    study: Study, name: str, trained: dict[str, Any], recipe: str, tokens: int
) -> dict[str, Any]:
    """Replayed tau of a drafter by domain, on the held-out conversations."""
    cfg = study.config(name)
    evaluation = read_json(cfg.place("evaluations"), f"{trained['name']}.json")
    if evaluation is None:
        evaluation = evaluate.run(cfg.override("evaluate", drafter=trained["folder"]))
    taus, seconds = evaluation["tau"]["domains"], read_result(cfg, trained["name"])["seconds"]
    return {"recipe": recipe, "tokens": tokens, "tau": taus, "seconds": seconds}


def finish(study: Study, found: list[dict[str, Any]]) -> None:
    """Print the table and the JSON line; write adapt.json and adapt.svg."""
    base, adapted = found[0], found[1:]
    for row in found:
        row["gain"] = row["tau"][NEW] / base["tau"][NEW] - 1
        row["kept"] = {name: row["tau"][name] / base["tau"][name] - 1 for name in OLD}
    write_json(place_of(str(study.folder)), "adapt.json", {"cpu": cpu_name(), "rows": found})
    table = [
        [r["recipe"], r["tokens"], r["tau"][NEW], *(r["tau"][n] for n in OLD), r["seconds"]]
        for r in found
    ]
    print_table("Adaptation to sql", ["recipe", "tokens", NEW, *OLD, "seconds"], table)
    draw(base, adapted).savefig(study.folder / "adapt.svg")
    most = [r for r in adapted if r["tokens"] == max(SIZES)]
    keeping = [r for r in most if min(r["kept"].values()) >= -0.01]
    keeping = keeping or [max(most, key=lambda row: min(row["kept"].values()))]
    best = max(keeping, key=lambda row: row["gain"])
    report("adapt", [1 + best["gain"]], "tau adapted / tau of the base", {"best": best})


def draw(base: dict[str, Any], adapted: list[dict[str, Any]]) -> Figure:
    """Tau on the new domain, and the worst change of an old one, by training tokens."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    gained, lost = figure.subplots(1, 2)
    for recipe in RECIPES:
        rows = [row for row in adapted if row["recipe"] == recipe]
        tokens = [row["tokens"] for row in rows]
        style = {"marker": "o", "linestyle": "--" if "no mix" in recipe else "-"}
        color = "tab:blue" if "LoRA" in recipe else "tab:orange"
        gained.plot(tokens, [row["tau"][NEW] for row in rows], color=color, label=recipe, **style)
        worst = [100 * min(row["kept"].values()) for row in rows]
        lost.plot(tokens, worst, color=color, **style)
    gained.axhline(base["tau"][NEW], color="gray", linestyle=":", label="base")
    lost.axhline(0, color="gray", linestyle=":")
    gained.set_ylabel(f"tau on {NEW}")
    lost.set_ylabel("worst change of tau, old domains (%)")
    for axes in (gained, lost):
        axes.set_xscale("log")
        axes.set_xticks(list(SIZES), [f"{size // 1000}k" for size in SIZES])
        axes.minorticks_off()
        axes.set_xlabel(f"answer tokens of {NEW}")
        axes.grid(alpha=0.3)
    gained.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    main()
