"""make bench-replay [ARGS="work=runs/mine"]: replay against decoding the same prompts.

Needs a finished demo (make demo): its target, its held-out prompts and its newest drafter. Two
programs decode: the reference decoder, whose rounds must equal replay's, and a vLLM server with the
drafter, which gets all requests at once. `ratio` compares the reference decoder with a replay whose
features exist already, as they do for every drafter and every K after the first. `detail` also has
the ratio to vLLM, and both ratios with the target's pass that computes the features.
"""

import statistics
import sys

import torch
from tqdm import tqdm

from bench.harness import report, seconds
from dflash.checkpoint import load_drafter
from dflash.decode import decode
from dflash.replay import Request, replay
from dflash.target_model import load_target
from jobs.base.config import load
from jobs.base.target_facts import end_tokens
from jobs.dataset.samples import load_requests
from jobs.evaluation.drafters import find_drafter
from jobs.proof.greedy_requests import as_request
from jobs.servers.configured import server
from jobs.servers.server_pool import serving
from serving.client import complete

REQUESTS, REPEATS = 16, 3


def main() -> None:
    """Compare and print the JSON line."""
    cfg = load(None, sys.argv[1:])
    rows = load_requests(cfg, "test")[0][:REQUESTS]
    target = load_target(cfg.target_path, torch.float32)
    folder = find_drafter(cfg, "")
    drafter = load_drafter(folder)
    k, taps, ends = drafter.cfg.num_drafts, drafter.cfg.target_layer_ids, end_tokens(cfg)
    decoded, requests, walked = [], [], []

    def reference() -> None:
        decoded[:] = [
            decode(target, row["prompt_ids"], len(row["output_ids"]), ends, drafter, k)
            for row in tqdm(rows, desc="decode")
        ]

    def features() -> None:
        ids = [
            [*row["prompt_ids"], *answer.output_ids]
            for row, answer in zip(rows, decoded, strict=True)
        ]
        requests[:] = [
            Request(torch.tensor(i), len(row["prompt_ids"]), found.taps)
            for i, row, found in zip(ids, rows, target.features(ids, taps), strict=True)
        ]

    def ours() -> None:
        walked[:] = replay(drafter, target.embedding, target.head, requests, k)

    times = []
    with server(serving(cfg, folder, [k]), "bench-replay.log") as vllm:

        def served() -> None:
            complete(vllm.url, [as_request(row) for row in rows], len(rows))

        for _ in range(REPEATS + 1):
            times.append([seconds(work) for work in (reference, served, features, ours)])
            accepted = [answer.accepted for answer in decoded]
            assert walked == accepted, "replay is not the decoder's walk"
    times = times[1:]  # the first one warms up
    ratios = {
        "vllm": [v / fast for _, v, _, fast in times],
        "with_features": [slow / (make + fast) for slow, _, make, fast in times],
        "vllm_with_features": [v / (make + fast) for _, v, make, fast in times],
    }
    detail = {
        "requests": len(rows),
        "tokens": sum(len(answer.output_ids) for answer in decoded),
        "rounds": sum(map(len, walked)),
        "k": k,
        **{f"ratio_{name}": round(statistics.median(r), 3) for name, r in ratios.items()},
        "seconds": [[round(second, 3) for second in time] for time in times],
    }
    report("replay", [slow / fast for slow, _, _, fast in times], "s decode / s replay", detail)


if __name__ == "__main__":
    main()
