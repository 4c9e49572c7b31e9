"""make bench-replay [ARGS="work=runs/mine"]: replay against decoding the same prompts.

Needs a finished demo (make demo): its target, its held-out prompts and its newest drafter. All is
measured twice: with this drafter, and with one that noise in its weights takes down to a tau of
LOW, where there are nearly as many rounds as tokens. Two programs decode: the reference decoder,
whose rounds must equal replay's, and a vLLM server with the drafter, which gets all requests at
once. `ratio` is the smaller one of both drafters: the reference decoder against a replay at the
largest K whose features exist already, as they do for every drafter and every K after the first.
`detail` has, for each drafter, the ratios to vLLM: of that replay, of the sweep over every K, and
of both together with the target's pass that computes the features.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm import tqdm

from bench.harness import cpu_name, report, seconds
from dflash.acceptance import tau
from dflash.checkpoint import load_drafter, save_drafter
from dflash.decode import decode
from dflash.model import Drafter, drafter_of
from dflash.replay import Replayable, Request, replay, replay_many
from dflash.target_model import Target, load_target
from dflash.training_step import generator
from jobs.base.config import Config, load
from jobs.base.target_facts import end_tokens
from jobs.dataset.samples import load_requests
from jobs.dataset.slices import Row
from jobs.evaluation.drafters import find_drafter
from jobs.proof.greedy_requests import as_request
from jobs.servers.configured import server
from jobs.servers.server_pool import serving
from serving.client import complete

REQUESTS, REPEATS = 16, 3
LOW, TOLERANCE = 1.4, 0.1


def main() -> None:
    """Compare and print the JSON line."""
    cfg = load(None, sys.argv[1:])
    rows, requests = load_requests(cfg, "test")
    rows, requests = rows[:REQUESTS], requests[:REQUESTS]
    target = load_target(cfg.target_path, torch.float32)
    folder = find_drafter(cfg, "")
    drafter = load_drafter(folder)
    with TemporaryDirectory() as temp:
        weak = save_drafter(weakened(drafter, target, requests), Path(temp), torch.float32)
        sides = {"trained": folder, "weak": weak}
        found = {name: measure(cfg, target, path, rows) for name, path in sides.items()}
    ratios = min((ratios for ratios, _ in found.values()), key=statistics.median)
    detail = {name: side for name, (_, side) in found.items()}
    versions = {"cpu": cpu_name(), "threads": torch.get_num_threads(), "requests": len(rows)}
    report("replay", ratios, "s decode / s replay", detail | versions)


def weakened(drafter: Drafter, target: Target, requests: Sequence[Replayable]) -> Drafter:
    """The drafter with so much noise in its matrices that its tau is LOW. Raises ValueError if no
    amount of noise gives that.
    """

    def noisy(share: float) -> Drafter:
        state = dict(drafter.state_dict())
        for name, param in drafter.named_parameters():
            noise = torch.randn(param.shape, generator=generator("noise", name))
            state[name] = param.detach() + share * param.detach().std() * noise
        return drafter_of(drafter.cfg, state)

    low, high = 0.0, 1.0
    while high - low > 1e-3:
        share = (low + high) / 2
        found = noisy(share)
        k, borrowed = drafter.cfg.num_drafts, (target.embedding, target.head)
        reached = tau(replay(found, *borrowed, requests, k))
        if abs(reached - LOW) < TOLERANCE:
            return found
        low, high = (share, high) if reached > LOW else (low, share)
    raise ValueError(f"no noise takes the drafter to tau {LOW}: train one (make demo)")


def measure(
    cfg: Config, target: Target, folder: Path, rows: list[Row]
) -> tuple[list[float], dict[str, Any]]:
    """Ratios of the reference decoder to replay, and the details of one drafter."""
    drafter = load_drafter(folder)
    models = (drafter, target.embedding, target.head)
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
            Request(torch.tensor(i), len(row["prompt_ids"]), made.taps)
            for i, row, made in zip(ids, rows, target.features(ids, taps), strict=True)
        ]

    def ours() -> None:
        walked[:] = replay(*models, requests, k)

    def sweep() -> None:
        replay_many(*models, requests, range(1, k + 1))

    times = []
    with server(serving(cfg, folder, [k]), "bench-replay.log") as vllm:

        def served() -> None:
            complete(vllm.url, [as_request(row) for row in rows], len(rows))

        served()  # warms up, as the replays of `weakened` did on our side
        for _ in range(REPEATS):
            works = (reference, served, features, ours, sweep)
            times.append([seconds(work) for work in works])
            assert walked == [answer.accepted for answer in decoded], "not the decoder's walk"
    ratios = {
        "vllm": [v / fast for _, v, _, fast, _ in times],
        "vllm_sweep": [v / every for _, v, _, _, every in times],
        "with_features": [slow / (make + fast) for slow, _, make, fast, _ in times],
        "vllm_with_features": [v / (make + fast) for _, v, make, fast, _ in times],
        "vllm_sweep_with_features": [v / (make + every) for _, v, make, _, every in times],
    }
    detail = {
        "tau": round(tau(walked), 3),
        "tokens": sum(len(answer.output_ids) for answer in decoded),
        "rounds": sum(map(len, walked)),
        "k": k,
        **{f"ratio_{name}": round(statistics.median(r), 3) for name, r in ratios.items()},
        "seconds": [[round(second, 3) for second in time] for time in times],
    }
    return [slow / fast for slow, _, _, fast, _ in times], detail


if __name__ == "__main__":
    main()
