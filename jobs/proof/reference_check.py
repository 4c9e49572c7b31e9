"""Replay against the reference decoder: real rounds with the real target, in float32."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dflash.checkpoint import drafter_sha256, load_drafter
from dflash.decode import decode
from dflash.identity import target_id
from dflash.replay import Request, replay
from dflash.target_model import load_target
from jobs.base.config import Config
from jobs.base.devices import compute_device, unfit
from jobs.base.target_facts import end_tokens
from jobs.dataset.acceptance_rows import acceptance_row, commit_rows
from jobs.proof.round_comparison import differing
from store.ids import drafter_version

Row = dict[str, Any]


def check_reference(cfg: Config, folder: Path, rows: list[Row]) -> dict[str, Any]:
    """Decode the first `verify.reference_requests` prompts and compare, round by round.

    It computes in float32, where rounds must be equal, near ties aside. `skipped` says why nothing
    was decoded: verify.reference_requests is 0, or the target does not fit into memory. Decoded
    answers become acceptance rows of origin decode.
    """
    chosen = rows[: cfg.verify.reference_requests]
    skipped = too_large(cfg) if chosen else "verify.reference_requests is 0"
    found = {"requests": 0, "identical": 0, "rounds": 0, "differing": [], "skipped": skipped}
    if skipped:
        return found
    device = compute_device(cfg)
    target = load_target(cfg.target_path, torch.float32, device)
    drafter = load_drafter(folder).to(device)
    models = (drafter, target.embedding, target.head)
    taps, k = drafter.cfg.target_layer_ids, drafter.cfg.num_drafts
    decoded = []
    for row in chosen:
        prompt = list(row["prompt_ids"])
        real = decode(target, prompt, len(row["output_ids"]), end_tokens(cfg), drafter, k)
        ids = [*prompt, *real.output_ids]
        request = Request(torch.tensor(ids), len(prompt), target.features([ids], taps)[0].taps)
        again = replay(*models, [request], k)[0]
        decoded.append((row | {"output_ids": real.output_ids}, real.accepted))
        found["requests"] += 1
        found["rounds"] += len(real.accepted)
        found["identical"] += again == real.accepted
        if again != real.accepted:
            parted = differing(models, row["sample_id"], request, real.accepted, again, k)
            found["differing"].append(
                {
                    "sample_id": row["sample_id"],
                    "decoded": real.accepted,
                    "replayed": again,
                    "near_tie": all(one.gap < one.bound for one in parted),
                }
            )
    commit_decoded(cfg, folder, decoded, k, drafter.cfg.block_size)
    return found


def too_large(cfg: Config) -> str:
    """Why the target does not fit into memory in float32; empty if it does."""
    why = unfit(cfg, torch.float32)
    return f"{why}: the reference decoder was not run" if why else ""


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
