"""flywheel methods [methods.names=ngram,dflash]

Other ways to draft, on the same traffic: serve the target with vLLM once without speculation and
once with each method, send the held-out prompts to all of them, and put tau, tokens per second,
latency and text side by side. A method that cannot run here is listed with the reason. The result
is kept in <work>/methods.
"""

from typing import Any

from dflash.identity import target_id
from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import print_table
from jobs.base.packages import vllm_version
from jobs.dataset.samples import rows_with_rounds
from jobs.dataset.slices import Row
from jobs.proof.draft_methods import describe
from jobs.proof.greedy_requests import servable
from jobs.proof.kept_results import methods_result
from jobs.proof.method_runs import compare_methods
from jobs.proof.speed import speed_domain, warn_if_unsteady
from jobs.reporting.methods_table import columns, lines
from store.place import read_json, write_json


def run(cfg: Config) -> dict[str, Any]:
    """Compare `methods.names` with no speculation; returns the measurements, kept ones if any.

    Raises ValueError without held-out samples, and for a model folder without a model.
    """
    methods = [describe(cfg, name) for name in cfg.methods.names]
    rows = rows_with_rounds(cfg)
    rows = servable(cfg, rows, max((k for method in methods for k in method.k), default=0))
    place, name = methods_result(cfg, methods, rows)
    if known := read_json(place, name, ["stage"]):
        return known | {"reused": True}
    result = {
        "stage": "methods",
        "target_id": target_id(cfg.target_path),
        "vllm": vllm_version(),
        "split": cfg.evaluate.split,
        "requests": len(rows),
        "speed_domain": speed_domain(cfg, rows),
        "repeats": cfg.verify.repeats,
        "methods": compare_methods(cfg, methods, rows, place / name.removesuffix(".json")),
    }
    show(result)
    return write_json(place, name, result) | {"reused": False}


def show(result: Row) -> None:
    """Print one line per method: what was measured, or why nothing was."""
    title = f"Methods on {result['requests']} held-out prompts, speed on {result['speed_domain']}"
    print_table(title, columns(result), lines(result))
    drafted = result["methods"][1:]
    warn_if_unsteady("methods", [s for row in drafted for s in row.get("speeds", [])])


if __name__ == "__main__":
    run_as_module("methods")
