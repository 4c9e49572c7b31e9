"""flywheel evaluate [FOLDER] [evaluate.baseline=FOLDER] [evaluate.split=test]

Replay a drafter (and a baseline) on held-out greedy conversations: one acceptance/ row per request
and K, <work>/evaluations/<drafter>.json with tau, intervals and the comparison, and a report page.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor
from tqdm import tqdm

from dflash.acceptance import num_rounds, positions, tau, tau_macro
from dflash.checkpoint import compat_fields, compat_key, load_drafter, read_config, weights_sha256
from dflash.model import Drafter, new_drafter
from dflash.replay import Request, replay
from dflash.target import load_borrowed, resolve_dtype, target_id
from jobs.cli import run_as_module
from jobs.config import Config
from jobs.console import print_table
from jobs.registry import resolve
from jobs.report import write_report
from jobs.samples import load_requests
from jobs.shape import drafter_config
from store.files import commit
from store.ids import drafter_version, short_hash
from store.schemas import ACCEPTANCE
from store.shards import (
    is_complete,
    read_manifests,
    shard_info,
    write_manifest,
    write_shard,
)

Row = dict[str, Any]
Borrowed = tuple[Tensor, Tensor]
"""The target's embedding and head."""


def run(cfg: Config) -> dict[str, Any]:
    """Evaluate `evaluate.drafter` (default: the newest) at every K; returns the summary.

    Raises ValueError without held-out samples and for a drafter of another target shape.
    """
    folder = find_drafter(cfg, cfg.evaluate.drafter)
    identity = target_id(cfg.target_path)
    check_shape(cfg, folder)
    rows, requests = load_requests(cfg, cfg.evaluate.split)
    if not num_rounds([[0]] * sum(r.num_output > 1 for r in requests)):
        raise ValueError(
            f"no greedy {cfg.evaluate.split} sample of target {identity} in {cfg.path('traffic')}: "
            "ingest more conversations or set evaluate.split"
        )
    borrowed = load_borrowed(cfg.target_path, resolve_dtype(cfg.target.dtype))
    drafter = load_drafter(folder, borrowed[0].dtype)
    walks = replay_all(drafter, borrowed, requests)
    commit_walks(cfg, identity, folder, drafter, rows, walks)
    full = drafter.cfg.num_drafts
    evaluation = {
        "drafter": folder.name,
        "weights_sha256": weights_sha256(folder),
        "target_id": identity,
        "compat_key": compat_key(drafter.cfg, identity),
        "compat": compat_fields(drafter.cfg, identity),
        "split": cfg.evaluate.split,
        "samples": len(rows),
        "rounds": num_rounds(walks[full]),
        "k": full,
        "tau": describe(cfg, rows, walks[full], full),
        "tau_by_k": {k: tau(walks[k]) for k in sorted(walks)},
        "tau_by_k_domain": {
            name: {k: tau(pick(rows, walks[k], name)) for k in sorted(walks)}
            for name in domains(rows)
        },
        "baseline": _baseline(cfg, identity, folder, rows, requests, borrowed, walks[full]),
    }
    evaluation = save_json(cfg.path("evaluations", f"{folder.name}.json"), evaluation)
    _print(evaluation)
    report = write_report(cfg, cfg.path("reports", f"{folder.name}.html"))
    return {"stage": "evaluate", "report": str(report), **evaluation}


def find_drafter(cfg: Config, named: str) -> Path:
    """The drafter folder `named`, else the newest below <work>/drafters."""
    if named:
        return Path(named)
    found = [p.parent for p in cfg.path("drafters").glob("[!.]*/config.json")]
    if not found:
        raise ValueError(f"no drafter in {cfg.path('drafters')}: run `flywheel train` first")
    return max(found, key=lambda p: (p / "config.json").stat().st_mtime)


def check_shape(cfg: Config, folder: Path) -> None:
    """Raise ValueError unless the drafter reads this target's features and head."""
    found, ours = read_config(folder), drafter_config(cfg)
    for name in ("hidden_size", "vocab_size", "num_target_layers", "target_layer_ids"):
        if getattr(found, name) != getattr(ours, name):
            raise ValueError(
                f"drafter {folder}: {name} is {getattr(found, name)}, but target "
                f"{cfg.target_path} with its features has {getattr(ours, name)}: "
                "this drafter is for another target, or drafter.taps differ"
            )


def replay_all(
    drafter: Drafter, borrowed: Borrowed, requests: list[Request]
) -> dict[int, list[list[int]]]:
    """Walks for every K from 1 to block_size - 1."""
    bar = tqdm(range(1, drafter.cfg.num_drafts + 1), desc="replay", unit="K")
    return {k: replay(drafter, *borrowed, requests, k) for k in bar}


def commit_walks(
    cfg: Config,
    identity: str,
    folder: Path,
    drafter: Drafter,
    rows: list[Row],
    walks: dict[int, list[list[int]]],
) -> None:
    """The walks as acceptance rows of origin replay, under a name made from what was replayed."""
    version = drafter_version(weights_sha256(folder))
    now = datetime.now(UTC)
    found = [
        acceptance_row(row, rounds, k, drafter.cfg.block_size, "replay", version, identity, now)
        for k, walk in walks.items()
        for row, rounds in zip(rows, walk, strict=True)
    ]
    key = short_hash(["replay", version, identity, [row["sample_id"] for row in rows]])
    inputs = {"drafter_version": version, "origin": "replay", "split": cfg.evaluate.split}
    commit_rows(cfg, key, found, inputs)


def acceptance_row(
    row: Row,
    accepted: list[int],
    k: int,
    block_size: int,
    origin: str,
    version: str,
    identity: str,
    now: datetime,
) -> Row:
    """One ACCEPTANCE row of a traffic row."""
    return {
        "request_id": f"{origin}-{row['sample_id']}",
        "sample_id": row["sample_id"],
        "conversation_id": row["conversation_id"],
        "origin": origin,
        "drafter_version": version,
        "target_id": identity,
        "domain": row["domain"],
        "k": k,
        "block_size": block_size,
        "temperature": 0.0,
        "accepted": accepted,
        "drafted": [k] * len(accepted),
        "prompt_tokens": len(row["prompt_ids"]),
        "output_tokens": len(row["output_ids"]),
        "started_at": now,
        "finished_at": now,
        "replica": "",
    }


def commit_rows(cfg: Config, key: str, rows: list[Row], inputs: dict[str, Any]) -> None:
    """Publish acceptance rows once under `key`, in place of older rows with the same inputs."""
    folder = cfg.path("acceptance")
    path = folder / f"{key}.parquet"
    table = pa.Table.from_pylist(rows, schema=ACCEPTANCE)
    shard = shard_info(path) if is_complete(path) else write_shard(path, table)
    older = [m["key"] for m in read_manifests(folder) if m["inputs"] == inputs and m["key"] != key]
    write_manifest(folder, key, [shard], inputs, replaces=older)


def describe(cfg: Config, rows: list[Row], accepted: list[list[int]], k: int) -> dict[str, Any]:
    """Tau pooled, macro, per domain, per position, and a bootstrap interval by conversation."""
    draws = bootstrap(rows, [accepted], cfg.evaluate.bootstrap)[0]
    return {
        "pooled": tau(accepted),
        "macro": tau_macro(accepted),
        "domains": {name: tau(pick(rows, accepted, name)) for name in domains(rows)},
        "positions": positions(accepted, k),
        "positions_by_domain": {
            name: positions(pick(rows, accepted, name), k) for name in domains(rows)
        },
        "ci": interval(draws),
    }


def domains(rows: list[Row]) -> list[str]:
    """Domains that have a round, sorted."""
    return sorted({row["domain"] for row in rows if len(row["output_ids"]) > 1})


def pick(rows: list[Row], accepted: list[list[int]], domain: str) -> list[list[int]]:
    """The requests of one domain."""
    return [a for row, a in zip(rows, accepted, strict=True) if row["domain"] == domain]


def bootstrap(rows: list[Row], walks: list[list[list[int]]], count: int) -> np.ndarray:
    """Resampled pooled tau [len(walks), count]; conversations are drawn, the same for all walks."""
    names = sorted({row["conversation_id"] for row in rows})
    where = {name: i for i, name in enumerate(names)}
    group = np.array([where[row["conversation_id"]] for row in rows])
    weights = np.random.default_rng(0).multinomial(len(names), [1 / len(names)] * len(names), count)
    found = []
    for walk in walks:
        tokens = np.bincount(group, [sum(a) + len(a) for a in walk], len(names))
        rounds = np.bincount(group, [len(a) for a in walk], len(names))
        with np.errstate(invalid="ignore"):
            found.append((weights @ tokens) / (weights @ rounds))
    return np.stack(found)


def interval(draws: np.ndarray) -> list[float]:
    """The 95 % percentile interval."""
    return [float(x) for x in np.nanpercentile(draws, [2.5, 97.5])]


def _baseline(
    cfg: Config,
    identity: str,
    folder: Path,
    rows: list[Row],
    requests: list[Request],
    borrowed: Borrowed,
    ours: list[list[int]],
) -> dict[str, Any] | None:
    """Paired comparison with evaluate.baseline, else with the champion, else None."""
    version, base = None, Path(cfg.evaluate.baseline) if cfg.evaluate.baseline else None
    if base is None:
        champion = resolve(cfg, "champion")
        if champion is None or weights_sha256(champion[1]) == weights_sha256(folder):
            return None
        version, base = champion
    check_shape(cfg, base)
    drafter = load_drafter(base, borrowed[0].dtype)
    walks = replay_all(drafter, borrowed, requests)
    commit_walks(cfg, identity, base, drafter, rows, walks)
    theirs = walks[drafter.cfg.num_drafts]
    draws = bootstrap(rows, [ours, theirs], cfg.evaluate.bootstrap)
    return {
        "version": version,
        "drafter": base.name,
        "weights_sha256": weights_sha256(base),
        "tau": describe(cfg, rows, theirs, drafter.cfg.num_drafts),
        "delta": tau(ours) - tau(theirs),
        "delta_ci": interval(draws[0] - draws[1]),
    }


def untrained_walks(cfg: Config, requests: list[Request], k: int) -> list[list[int]]:
    """Walks of a random drafter of the configured shape: what the loop starts from."""
    borrowed = load_borrowed(cfg.target_path, resolve_dtype(cfg.target.dtype))
    drafter = new_drafter(drafter_config(cfg), cfg.train.seed)
    return replay(drafter, *borrowed, requests, k)


def save_json(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    """Write a JSON file in one step; returns what a reader of it gets."""
    data = json.dumps(value, indent=1).encode() + b"\n"
    commit(path, lambda stream: stream.write(data))
    return json.loads(data)


def _print(evaluation: dict[str, Any]) -> None:
    measured = evaluation["tau"]
    low, high = measured["ci"]
    print_table(
        f"Replay of {evaluation['drafter']} on {evaluation['split']}, K = {evaluation['k']}",
        ["slice", "tau"],
        [
            ["pooled", measured["pooled"]],
            ["95 % interval", f"{low:.3f} .. {high:.3f}"],
            ["macro (mean of requests)", measured["macro"]],
            *[[f"domain {name}", value] for name, value in measured["domains"].items()],
        ],
    )


if __name__ == "__main__":
    run_as_module("evaluate")
