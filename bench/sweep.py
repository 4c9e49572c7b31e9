"""make bench-sweep: which recipe learns most from the demo's traffic with equally many tokens.

Every recipe trains a new drafter once per seed, on the same number of supervised block tokens (with
a random block size on fewer), and is scored by replay on the held-out conversations. Needs a
finished demo. It takes over an hour on two cores and continues after Ctrl-C. Ends with
<work>/sweep/sweep.json and one JSON line. `ratio` is tau of the default over tau of the best other
recipe.
"""

import statistics
import sys
from typing import Any

from bench.harness import cpu_name, report
from jobs import evaluate, harvest, ingest, select, train
from jobs.base.cluster import cluster
from jobs.base.config import Config, load
from jobs.base.console import print_table
from jobs.training.states import read_result
from store.place import read_json, write_json

STEPS = 100
SEEDS = (0, 1)
DEFAULT = "default"
RECIPES = {
    DEFAULT: [],
    "decay, gamma 4": ["train.weights=decay"],
    "decay, gamma 2": ["train.weights=decay", "train.gamma=2"],
    "half the anchors, twice the steps": ["train.anchors=16", f"train.steps={2 * STEPS}"],
    "kl": ["train.loss=kl"],
    "total variation added": ["train.tv=1"],
    "AdamW 3e-3": ["train.optimizer=adamw", "train.lr=3e-3"],
    "moving average 0.95": ["train.ema=0.95"],
    "random block size": ["train.random_block=true"],
    "Muon 1e-2": ["train.lr=1e-2"],
    "Muon 3e-2": ["train.lr=3e-2"],
    "argmax": ["train.loss=argmax"],
    "decay, AdamW 6e-4, as published": [
        "train.weights=decay",
        "train.optimizer=adamw",
        "train.lr=6e-4",
        "train.warmup=0.04",
    ],
}


def main() -> None:
    """Harvest with log-probabilities, train and score every recipe, print the JSON line."""
    demo = load(None, sys.argv[1:])
    shared = [f"target.path={demo.target_path}", f"ingest.logs={demo.path('capture')}"]
    shared += [*sys.argv[1:], f"work={demo.path('sweep')}", "harvest.top_k=16"]
    shared += [f"train.steps={STEPS}"]
    cfg = load(None, shared)
    with cluster(cfg):
        ingest.run(cfg)
        select.run(cfg)
        harvest.run(cfg)
        found = {
            name: [score(load(None, [*shared, *more, f"train.seed={seed}"])) for seed in SEEDS]
            for name, more in RECIPES.items()
        }
    write_json(cfg.place(), "sweep.json", {"cpu": cpu_name(), "recipes": found})
    taus = {name: [run["tau"] for run in runs] for name, runs in found.items()}
    seconds = {name: statistics.mean(r["seconds"] for r in runs) for name, runs in found.items()}
    mean = {name: statistics.mean(values) for name, values in taus.items()}
    table = [[name, mean[name], *taus[name], seconds[name]] for name in RECIPES]
    seeds = [f"seed {seed}" for seed in SEEDS]
    print_table("Replayed tau", ["recipe", "mean", *seeds, "s of training"], table)
    best = max((name for name in mean if name != DEFAULT), key=lambda name: mean[name])
    ratios = [ours / other for ours, other in zip(taus[DEFAULT], taus[best], strict=True)]
    detail = {"cpu": cpu_name(), "steps": STEPS, "seeds": SEEDS, "best_other": best, "tau": taus}
    report("sweep", ratios, "tau of the default / tau of the best other recipe", detail)


def score(cfg: Config) -> dict[str, Any]:
    """Pooled replayed tau of the drafter that this recipe trains, and its seconds of training."""
    cfg = cfg.override("train", val_every=cfg.train.steps)
    trained = train.run(cfg)
    evaluation = read_json(cfg.place("evaluations"), f"{trained['name']}.json")
    if evaluation is None:
        evaluation = evaluate.run(cfg.override("evaluate", drafter=trained["folder"]))
    seconds = read_result(cfg, trained["name"])["seconds"]
    return {"tau": evaluation["tau"]["pooled"], "seconds": seconds}


if __name__ == "__main__":
    main()
