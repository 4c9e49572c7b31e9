"""flywheel evaluate [FOLDER] [evaluate.baseline=FOLDER] [evaluate.regression=humaneval,FILE]

Replay a drafter (and a baseline) on held-out conversations, greedy and sampled, and on regression
sets: one acceptance/ row per request and K, <work>/evaluations/<drafter>.json with tau, intervals,
slices and the comparison, and a report page.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor
from tqdm import tqdm

from dflash.acceptance import num_rounds, tau
from dflash.checkpoint import compat_fields, compat_key, drafter_sha256
from dflash.model import Drafter, new_drafter
from dflash.replay import Request, replay, replay_many
from dflash.target_model import target_id
from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table, short_name
from jobs.base.target_facts import drafter_config
from jobs.dataset.slices import Row, Walks, largest
from jobs.evaluation.drafters import (
    Borrowed,
    Side,
    baseline_side,
    check_shape,
    drafter_on,
    features_of,
    held_out,
    load_on,
)
from jobs.evaluation.intervals import Resamples
from jobs.evaluation.regression_sets import load_sets
from jobs.evaluation.summaries import by_k, describe, gain
from jobs.reporting.page import publish
from store.files import commit
from store.ids import drafter_version, short_hash
from store.leakage import leaking
from store.schemas import ACCEPTANCE
from store.shards import (
    is_complete,
    read_manifests,
    shard_info,
    write_manifest,
    write_shard,
)
from store.traffic_table import read_traffic

ENOUGH = 0.98
"""Share of the answers' tokens that a draft vocabulary should hold."""


def run(cfg: Config) -> dict[str, Any]:
    """Evaluate `evaluate.drafter` (default: the newest) at every K; returns the summary.

    Both sides read the features of their own taps. Raises ValueError without held-out samples, for
    a drafter of another target and for features that were not harvested.
    """
    folder = find_drafter(cfg, cfg.evaluate.drafter)
    identity = target_id(cfg.target_path)
    check_shape(cfg, folder)
    borrowed = load_on(cfg)
    ours = Side(folder=folder, drafter=drafter_on(folder, borrowed))
    theirs = baseline_side(cfg, folder, borrowed)
    sides = [ours] if theirs is None else [ours, theirs]
    rows = held_out(cfg, sides)
    found, requests, taps = [], [], ()
    for side in sides:
        if side.taps != taps:
            requests.clear()  # before the others come into memory
            requests, taps = features_of(cfg, side, rows), side.taps
        found.append(replay_all(side.drafter, borrowed, requests))
        commit_walks(cfg, identity, side.folder, side.drafter, rows, found[-1])
    walks = found[0]
    evaluation = {
        "drafter": folder.name,
        "drafter_sha256": drafter_sha256(folder),
        "target_id": identity,
        "compat_key": compat_key(ours.drafter.cfg, identity),
        "compat": compat_fields(ours.drafter.cfg, identity),
        "split": cfg.evaluate.split,
        "leaking": leaks(cfg, identity, rows),
        "k": ours.k,
        "draftable": draftable(ours.drafter, borrowed[1], requests),
        **compare(cfg, rows, sides, [w[side.k] for side, w in zip(sides, found, strict=True)]),
        **by_k(walks),
        "tau_by_k_domain": {
            name: {k: tau(pick(rows, walks[k], name)) for k in sorted(walks)}
            for name in domains(rows)
        },
        **regression(cfg, sides, borrowed),
    }
    evaluation = save_json(cfg.path("evaluations", f"{folder.name}.json"), evaluation)
    _print(evaluation)
    page = publish(cfg, evaluation["drafter_sha256"])
    return {"stage": "evaluate", "report": str(page), **evaluation}


def leaks(cfg: Config, identity: str, rows: list[Row]) -> dict[str, int]:
    """How many of the held-out rows share their text with training rows."""
    train, asked = (
        read_traffic(cfg.path("traffic"), identity, split)
        for split in ("train", cfg.evaluate.split)
    )
    known = leaking(train, asked) & {row["sample_id"] for row in rows}
    return {"leaking": len(known), "samples": len(rows)}


def regression(cfg: Config, sides: Sequence[Side], borrowed: Borrowed) -> dict[str, Any]:
    """The comparison on every set of evaluate.regression, each side with its own taps, and why
    there is none on the others.
    """
    sets = {
        taps: load_sets(cfg.override("drafter", taps=list(taps)))
        for taps in dict.fromkeys(side.taps for side in sides)
    }
    found = {}
    for name in sets[sides[0].taps].answered:
        walked: list[dict[tuple[str, str], tuple[Row, list[int]]]] = []
        for side in sides:
            rows, asked = sets[side.taps].answered[name]
            walks = replay(side.drafter, *borrowed, asked, side.k)
            keys = [(row["conversation_id"], row["sample_id"]) for row in rows]
            walked.append(dict(zip(keys, zip(rows, walks, strict=True), strict=True)))
        both = [key for key in walked[0] if all(key in other for other in walked)]
        walks = [[one[key][1] for key in both] for one in walked]
        found[name] = compare(cfg, [walked[0][key][0] for key in both], sides, walks)
    return {"regression": found, "regression_skipped": sets[sides[0].taps].skipped}


def draftable(drafter: Drafter, head: Tensor, requests: Sequence[Request]) -> float:
    """Share of the answers' tokens, first ones excepted, that the drafter's vocabulary holds."""
    tokens = torch.cat([r.ids[r.num_prompt + 1 :] for r in requests])
    return float(torch.isin(tokens, drafter.draft_head(head)[0].cpu()).double().mean())


def compare(
    cfg: Config, rows: list[Row], sides: Sequence[Side], walks: Sequence[Walks]
) -> dict[str, Any]:
    """Tau of the first side and, if there is a second, the paired gain over it as `baseline`."""
    draws = Resamples([row["conversation_id"] for row in rows], cfg.evaluate.bootstrap)
    found = {
        "samples": len(rows),
        "conversations": draws.size,
        "rounds": num_rounds(walks[0]),
        "tau": describe(draws, rows, walks[0], sides[0].k),
        "baseline": None,
    }
    if len(sides) > 1:
        other = sides[1]
        found["baseline"] = {
            "version": other.version,
            "drafter": other.folder.name,
            "drafter_sha256": drafter_sha256(other.folder),
            "tau": describe(draws, rows, walks[1], other.k),
            **gain(draws, rows, walks[0], walks[1], (sides[0].k, other.k)),
        }
    return found


def find_drafter(cfg: Config, named: str) -> Path:
    """The drafter folder `named`, else the newest below <work>/drafters."""
    if named:
        return Path(named)
    found = [p.parent for p in cfg.path("drafters").glob("[!.]*/config.json")]
    if not found:
        raise ValueError(f"no drafter in {cfg.path('drafters')}: run `flywheel train` first")
    return max(found, key=lambda p: (p / "config.json").stat().st_mtime)


def replay_all(
    drafter: Drafter, borrowed: Borrowed, requests: list[Request]
) -> dict[int, list[list[int]]]:
    """Walks for every K from 1 to block_size - 1.

    K drafts are served as a block of K + 1 slots, so this is every smaller block size, too.
    """
    ks = range(1, drafter.cfg.num_drafts + 1)
    with tqdm(total=len(requests), desc="replay", unit="request") as bar:
        return replay_many(drafter, *borrowed, requests, ks, progress=bar.update)


def commit_walks(
    cfg: Config,
    identity: str,
    folder: Path,
    drafter: Drafter,
    rows: list[Row],
    walks: dict[int, list[list[int]]],
) -> None:
    """The walks as acceptance rows of origin replay."""
    version = drafter_version(drafter_sha256(folder))
    now = datetime.now(UTC)
    found = [
        acceptance_row(row, rounds, k, drafter.cfg.block_size, "replay", version, identity, now)
        for k, walk in walks.items()
        for row, rounds in zip(rows, walk, strict=True)
    ]
    inputs = {"drafter_version": version, "origin": "replay", "split": cfg.evaluate.split}
    commit_rows(cfg, found, inputs)


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
        "temperature": row["temperature"],
        "accepted": accepted,
        "drafted": [k] * len(accepted),
        "prompt_tokens": len(row["prompt_ids"]),
        "output_tokens": len(row["output_ids"]),
        "started_at": now,
        "finished_at": now,
        "replica": "",
    }


def commit_rows(cfg: Config, rows: list[Row], inputs: dict[str, Any]) -> None:
    """Publish acceptance rows in place of those with the same inputs; equal ones are kept."""
    folder = cfg.path("acceptance")
    content = short_hash([[r["request_id"], r["target_id"], r["k"], r["accepted"]] for r in rows])
    live = [m for m in read_manifests(folder) if m["inputs"] == inputs]
    if [m["detail"].get("content") for m in live] == [content]:
        return
    replaces = sorted(m["key"] for m in live)
    # Going back to former rows must not meet the manifest that was replaced: hence another key.
    key = short_hash([inputs, content, replaces])
    path = folder / f"{key}.parquet"
    table = pa.Table.from_pylist(rows, schema=ACCEPTANCE)
    shard = shard_info(path) if is_complete(path) else write_shard(path, table)
    write_manifest(folder, key, [shard], inputs, {"content": content}, replaces)


def domains(rows: list[Row]) -> list[str]:
    """Domains that have a round, sorted."""
    return sorted({row["domain"] for row in rows if len(row["output_ids"]) > 1})


def pick(rows: list[Row], accepted: list[list[int]], domain: str) -> list[list[int]]:
    """The requests of one domain."""
    return [a for row, a in zip(rows, accepted, strict=True) if row["domain"] == domain]


def untrained_walks(cfg: Config, requests: list[Request], k: int) -> list[list[int]]:
    """Walks of a random drafter of the configured layers: what the loop starts from."""
    borrowed = load_on(cfg)
    drafter = new_drafter(replace(drafter_config(cfg), draft_vocab_size=0), cfg.train.seed)
    return replay(drafter.to(borrowed[0]), *borrowed, requests, k)


def save_json(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    """Write a JSON file in one step; returns what a reader of it gets."""
    data = json.dumps(value, indent=1).encode() + b"\n"
    commit(path, lambda stream: stream.write(data))
    return json.loads(data)


def _print(evaluation: dict[str, Any]) -> None:
    measured = evaluation["tau"]
    lines = [
        ["pooled", measured["pooled"], _words(measured["ci"])],
        ["macro (mean of requests)", measured["macro"], ""],
    ]
    for dimension, parts in measured["slices"].items():
        kept = largest({name: part["rounds"] for name, part in parts.items()})
        for n in kept:
            part = parts[n]
            lines.append([f"{dimension} {short_name(n)}", part["tau"], _words(part["ci"])])
        if len(kept) < len(parts):
            lines.append([f"{dimension}: {len(parts) - len(kept)} smaller ones", None, ""])
    title = f"Replay of {evaluation['drafter']} on {evaluation['split']}, K = {evaluation['k']}"
    print_table(title, ["slice", "tau", "95 % interval"], lines)
    found = evaluation["leaking"]
    if found["leaking"]:
        console.print(
            f"{found['leaking']} of {found['samples']} samples share their text with "
            "training samples: tau is too high for new traffic",
            style="yellow",
        )
    if evaluation["draftable"] < ENOUGH:
        console.print(
            f"only {evaluation['draftable']:.1%} of the answers' tokens are in the draft "
            "vocabulary, which caps tau: train a new drafter with a larger drafter.draft_vocab",
            style="yellow",
        )
    alpha = evaluation["alpha"]
    print_table(
        f"By K, and what one acceptance chance of {alpha['fit']:.3f} would give",
        ["K", "tau", "model", "misfit"],
        [[k, t, alpha["tau"][k], alpha["misfit"][k]] for k, t in evaluation["tau_by_k"].items()],
    )
    compared = {f"on {evaluation['split']}": evaluation} | evaluation["regression"]
    for name, found in evaluation["regression"].items():
        console.print(f"{name}: tau {found['tau']['pooled']:.3f} ({_words(found['tau']['ci'])})")
    for name, found in compared.items():
        if found["baseline"]:
            _print_gain(name, found["baseline"])


def _print_gain(name: str, baseline: dict[str, Any]) -> None:
    needed = ", ".join(f"{n}: {c}" for n, c in baseline["conversations_for"].items() if c)
    console.print(
        f"gain over {baseline['drafter']}, {name}: {baseline['delta']:+.3f} "
        f"({_words(baseline['delta_ci'])}) on {baseline['conversations']} conversations; "
        f"conversations that a gain of so much needs: {needed or 'unknown'}"
    )


def _words(ci: list[float] | None) -> str:
    return "too few conversations" if ci is None else f"{ci[0]:.3f} .. {ci[1]:.3f}"


if __name__ == "__main__":
    run_as_module("evaluate")
