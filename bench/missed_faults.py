"""Whether a wrong drafter is called wrong: it is served with one change, and replayed without.

    python -m bench.missed_faults work=runs/demo target.dtype=bfloat16

REQUESTS new prompts are answered with a copy of the drafter that differs in one field of its
config.json, or in its weights. The answers are compared with the unchanged drafter, as `flywheel
preflight` and `flywheel verify` do it. `missed` lists changes that no check found and must be
empty; so must `healthy`, the checks that fail without a change. bench/false_alarms.py tests the
opposite error.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.false_alarms import REQUESTS, new_requests
from bench.harness import cpu_name
from jobs.base.config import Config, load
from jobs.base.console import console
from jobs.base.devices import dtype_name
from jobs.base.packages import vllm_version
from jobs.dataset.samples import load_rows
from jobs.evaluation.drafters import find_drafter
from jobs.proof.engine_checks import Ours, check_drafts
from jobs.proof.preflight_run import answer_of, prepare, traces, with_noise
from jobs.proof.round_comparison import compare
from jobs.servers.configured import server
from jobs.servers.server_pool import serving
from serving.client import Request, complete
from serving.drafts import read_drafts

Change = Callable[[Path], None]


def field(**fields: Any) -> Change:
    """A change of values in config.json; keys of its dflash_config are changed there."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        raw = json.loads(path.read_text())
        inner = {name: fields[name] for name in fields if name in raw["dflash_config"]}
        raw |= {name: fields[name] for name in fields if name not in inner}
        raw["dflash_config"] |= inner
        path.write_text(json.dumps(raw))

    return change


def next_taps(folder: Path) -> None:
    """Read each feature one layer later."""
    raw = json.loads((folder / "config.json").read_text())
    field(target_layer_ids=[i + 1 for i in raw["dflash_config"]["target_layer_ids"]])(folder)


def noisy_weights(folder: Path) -> None:
    """Add 20 % noise to every matrix, as if the weights were of another run or step."""
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(0)
    weights = load_file(path)
    for name, tensor in weights.items():
        if tensor.ndim == 2:
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * 0.2
            weights[name] = (tensor.float() + noise).to(tensor.dtype)
    save_file(weights, path, {"format": "pt"})


FAULTS: dict[str, Change] = {
    "healthy": field(),
    "is_causal": field(is_causal=True),
    "rms_norm_eps": field(rms_norm_eps=0.1),
    "rope_theta": field(rope_theta=1e6),
    "mask_token_id": field(mask_token_id=1000),  # reserved tokens share one untrained embedding
    "target_layer_ids": next_taps,
    "weights": noisy_weights,
}


def main(cfg: Config) -> dict[str, Any]:
    """Start one server per fault; returns the content of the JSON line."""
    folder = find_drafter(cfg, cfg.evaluate.drafter)
    asked, found = new_requests(cfg, REQUESTS), {}
    ours = prepare(cfg, folder, load_rows(cfg, cfg.evaluate.split)[:1])
    for name, change in FAULTS.items():
        with tempfile.TemporaryDirectory() as temporary:
            copy = shutil.copytree(folder, Path(temporary) / "drafter")
            change(copy)
            found[name] = judged(cfg, folder, copy, ours, asked)
        console.print(f"{name}: {found[name]}")
    missed = [name for name in FAULTS if name != "healthy" and not found[name]["caught"]]
    about = {"dtype": dtype_name(cfg), "requests": len(asked), "k": ours.k, "vllm": vllm_version()}
    return {
        "name": "missed-faults",
        "missed": missed,
        "healthy": found["healthy"]["caught"],
        "detail": about | {"cpu": cpu_name(), "found": found},
    }


def judged(
    cfg: Config, folder: Path, served: Path, ours: Ours, asked: list[Request]
) -> dict[str, Any]:
    """Which checks find that the served drafter is not the one in `folder`, and the counts."""
    running = server(serving(cfg, str(served), [ours.k]), "missed-faults.log")
    running.drafts = cfg.path("server_logs", "missed-faults.drafts")
    with running:
        answers = complete(running.url, asked, cfg.verify.concurrency)
    names = [str(one.conversation) for one in asked]
    read = [answer_of(ours, one) for one in answers]
    drafted = traces(names, answers, read, read_drafts(running.drafts))
    ours = with_noise(cfg, folder, ours, drafted)
    of = {one.request_id: answer for one, answer in zip(answers, read, strict=True)}
    named = list(zip(names, answers, strict=True))
    rounds = compare(ours.target, ours.drafter, named, ours.k, lambda one: of[one.request_id])
    drafts, counts = check_drafts(replace(ours, table=ours.table[:1]), drafted)
    failed = {"drafts": drafts.status == "fail", "rounds": bool(rounds.faults())}
    return {
        "caught": [name for name, fails in failed.items() if fails],
        "drafts": drafts.found,
        "different": f"{counts['different']} of {counts['drafts']}",
        "rounds": rounds.words(),
        "faults": rounds.faults(),
    }


if __name__ == "__main__":
    print(json.dumps(main(load(None, sys.argv[1:]))))
