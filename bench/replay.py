"""make bench-replay [ARGS="work=runs/mine"]: replay against the reference decoder, same prompts.

Needs a finished demo (make demo): its target, its held-out prompts and its newest drafter. Both
sides must walk the same rounds in float32. `ratio` is for one replay over features that are there,
as for every drafter and every K after the first; `detail` has it with the target's pass that makes
them, too.
"""

import statistics
import sys

import torch
from tqdm import tqdm

from bench.harness import report, seconds
from dflash.checkpoint import load_drafter
from dflash.decode import decode
from dflash.replay import Request, replay
from dflash.target import load_target
from jobs.config import load
from jobs.evaluate import find_drafter
from jobs.samples import load_requests
from jobs.shape import end_tokens

REQUESTS, REPEATS = 16, 3


def main() -> None:
    """Compare and print the JSON line."""
    cfg = load(None, sys.argv[1:])
    rows = load_requests(cfg, "test")[0][:REQUESTS]
    target = load_target(cfg.target_path, torch.float32)
    drafter = load_drafter(find_drafter(cfg, ""))
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
    for _ in range(REPEATS + 1):
        times.append((seconds(reference), seconds(features), seconds(ours)))
        assert walked == [answer.accepted for answer in decoded], "replay is not the decoder's walk"
    times = times[1:]  # the first one warms up
    whole = statistics.median(slow / (make + fast) for slow, make, fast in times)
    detail = {
        "requests": len(rows),
        "tokens": sum(len(answer.output_ids) for answer in decoded),
        "rounds": sum(map(len, walked)),
        "k": k,
        "ratio_with_features": round(whole, 3),
        "seconds": [[round(second, 3) for second in time] for time in times],
    }
    report("replay", [slow / fast for slow, _, fast in times], "s decode / s replay", detail)


if __name__ == "__main__":
    main()
