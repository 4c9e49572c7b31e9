"""make bench-replay [ARGS="work=runs/mine"]: replay against the reference decoder, same prompts.

Needs a finished demo (make demo): its target, its held-out answers and its newest drafter. Both
sides must walk the same rounds in float32; the seconds of replay include the target's pass that
makes the features.
"""

import sys

import torch

from bench.harness import report, seconds
from dflash.checkpoint import load_drafter
from dflash.decode import decode
from dflash.replay import Request, replay
from dflash.target import load_target
from jobs.config import load
from jobs.evaluate import find_drafter
from jobs.samples import load_requests
from jobs.verify import end_tokens

REQUESTS = 6


def main() -> None:
    """Compare and print the JSON line."""
    cfg = load(None, sys.argv[1:])
    rows = load_requests(cfg, "test")[0][:REQUESTS]
    target = load_target(cfg.target_path, torch.float32)
    drafter = load_drafter(find_drafter(cfg, ""))
    k, taps, ends = drafter.cfg.num_drafts, drafter.cfg.target_layer_ids, end_tokens(cfg)
    decoded, walked = [], []

    def reference() -> None:
        decoded[:] = [
            decode(target, row["prompt_ids"], len(row["output_ids"]), ends, drafter, k)
            for row in rows
        ]

    def ours() -> None:
        ids = [
            [*row["prompt_ids"], *answer.output_ids]
            for row, answer in zip(rows, decoded, strict=True)
        ]
        found = target.features(ids, taps)
        requests = [
            Request(torch.tensor(i), len(row["prompt_ids"]), f.taps)
            for i, row, f in zip(ids, rows, found, strict=True)
        ]
        walked[:] = replay(drafter, target.embedding, target.head, requests, k)

    reference()
    ours()
    assert walked == [answer.accepted for answer in decoded], "replay is not the decoder's walk"
    ratios = [seconds(reference) / seconds(ours) for _ in range(3)]
    rounds = sum(map(len, walked))
    report(
        "replay", ratios, "s decode / s replay", {"requests": len(rows), "rounds": rounds, "k": k}
    )


if __name__ == "__main__":
    main()
