"""Replay against the reference decoder: real rounds with the real target, in float32."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dflash.checkpoint import drafter_sha256, load_drafter
from dflash.decode import decode
from dflash.replay import Request, replay
from dflash.target import load_target, target_id
from jobs.config import Config
from jobs.evaluate import acceptance_row, commit_rows
from jobs.shape import end_tokens
from store.ids import drafter_version

Row = dict[str, Any]


def check_reference(cfg: Config, folder: Path, rows: list[Row]) -> dict[str, Any]:
    """Decode the first `verify.reference_requests` prompts and compare, round by round.

    What was decoded becomes acceptance rows of origin decode.
    """
    target = load_target(cfg.target_path, torch.float32)
    drafter = load_drafter(folder)
    taps, k = drafter.cfg.target_layer_ids, drafter.cfg.num_drafts
    end = end_tokens(cfg)
    identical, rounds, differing, decoded = 0, 0, [], []
    chosen = rows[: cfg.verify.reference_requests]
    for row in chosen:
        prompt = list(row["prompt_ids"])
        real = decode(target, prompt, len(row["output_ids"]), end, drafter, k)
        ids = [*prompt, *real.output_ids]
        features = target.features([ids], taps)[0].taps
        request = Request(torch.tensor(ids), len(prompt), features)
        again = replay(drafter, target.embedding, target.head, [request], k)[0]
        rounds += len(real.accepted)
        decoded.append((row | {"output_ids": real.output_ids}, real.accepted))
        if again == real.accepted:
            identical += 1
        else:
            differing.append(
                {"sample_id": row["sample_id"], "decoded": real.accepted, "replayed": again}
            )
    commit_decoded(cfg, folder, decoded, k, drafter.cfg.block_size)
    return {
        "requests": len(chosen),
        "identical": identical,
        "rounds": rounds,
        "differing": differing,
    }


def commit_decoded(
    cfg: Config, folder: Path, decoded: list[tuple[Row, list[int]]], k: int, block_size: int
) -> None:
    """Publish (traffic row with the decoded output, accepted counts) as acceptance rows."""
    version, identity = drafter_version(drafter_sha256(folder)), target_id(cfg.target_path)
    now = datetime.now(UTC)
    found = [
        acceptance_row(row, rounds, k, block_size, "decode", version, identity, now)
        for row, rounds in decoded
    ]
    inputs = {"drafter_version": version, "origin": "decode", "split": cfg.evaluate.split}
    commit_rows(cfg, found, inputs)
