"""Our drafter folder in z-lab's public client, round by round against our replay, in float32.

    pip install --no-deps --target build/zlab dflash==0.1.0   # not into .venv: the names collide
    make bench-zlab-client ARGS="build/zlab"    # or "build/zlab work=runs/mine"

Needs a finished demo (make demo). The client runs in its own process, where `import dflash` finds
their package. It decodes held-out prompts, and replay walks the text that it wrote.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from bench.harness import report
from dflash.checkpoint import load_drafter
from dflash.model import reshaped
from dflash.replay import Request, replay
from dflash.target_model import load_target
from jobs.base.config import load
from jobs.base.target_facts import end_tokens
from jobs.dataset.samples import load_requests
from jobs.evaluation.drafters import find_drafter

REQUESTS = 10

CLIENT = """
import json, sys, torch
torch.cuda.synchronize = lambda: None  # the client times itself with it
from transformers import AutoModelForCausalLM
from dflash.model import DFlash2DraftModel, DFlashDraftModel, dflash_generate
target, drafter, prompts, ends = json.load(sys.stdin)
load = dict(attn_implementation="sdpa", dtype=torch.float32)
target = AutoModelForCausalLM.from_pretrained(target, **load).eval()
models = {"DFlashDraftModel": DFlashDraftModel, "DFlash2DraftModel": DFlash2DraftModel}
named = json.load(open(drafter + "/config.json"))["architectures"][0]
drafter = models[named].from_pretrained(drafter, **load).eval()
found = []
for prompt, most in prompts:
    ids = torch.tensor([prompt])
    out = dflash_generate(drafter, target, ids, most, ends, return_stats=True)
    found.append([out.output_ids[0, len(prompt):].tolist(), list(map(int, out.acceptance_lengths))])
print(json.dumps(found))
"""


def main() -> None:
    """Compare and print the JSON line; `ratio` is the share of requests with identical rounds."""
    client = Path(sys.argv[1]).absolute()
    cfg = load(None, sys.argv[2:])
    folder = find_drafter(cfg, cfg.evaluate.drafter)
    rows = load_requests(cfg, "test")[0][:REQUESTS]
    prompts = [(row["prompt_ids"], len(row["output_ids"])) for row in rows]
    answers = run_client(client, [str(cfg.target_path), str(folder), prompts, end_tokens(cfg)])
    target = load_target(cfg.target_path, torch.float32)
    drafter = load_drafter(folder)  # the client has no reduced vocabulary
    drafter = reshaped(drafter, replace(drafter.cfg, draft_vocab_size=0), seed=0)
    equal, rounds, same_rounds = [], 0, 0
    for row, (output, lengths) in zip(rows, answers, strict=True):
        ids = [*row["prompt_ids"], *output]
        features = target.features([ids], drafter.cfg.target_layer_ids)[0].taps
        request = Request(torch.tensor(ids), len(row["prompt_ids"]), features)
        [walk] = replay(drafter, target.embedding, target.head, [request], drafter.cfg.num_drafts)
        ours = [count + 1 for count in walk]
        equal.append(float(ours == lengths))
        rounds += len(lengths)
        same_rounds += sum(a == b for a, b in zip(ours, lengths, strict=False))
    detail = {"requests": len(rows), "rounds": rounds, "identical_rounds": same_rounds}
    mean = sum(equal) / len(equal)
    report("zlab-client", [mean], "share of requests with identical rounds", detail)


def run_client(client: Path, task: list) -> list:
    """Decode with z-lab's client, in its own process with its own import path."""
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(
            [sys.executable, "-c", CLIENT],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            cwd=elsewhere,
            env=os.environ | {"PYTHONPATH": str(client)},
            check=False,
        )
    if done.returncode:
        raise ValueError(f"the client in {client} failed: {done.stderr[-1000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
