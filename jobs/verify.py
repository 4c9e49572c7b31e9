"""flywheel verify

The proof: serve the target with the champion, send the held-out prompts again, replay what it
answers and put the acceptance that vLLM counted beside it; compare the greedy text with and without
the drafter, judged by two runs without it; choose K from measured cost and acceptance; measure the
speed-up. Results are kept in <work>/verified; exits 1 where a limit is exceeded.
"""

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.compute as pc

from dflash.acceptance import tau
from dflash.checkpoint import drafter_sha256, load_drafter, read_config
from dflash.target_model import load_target, target_id
from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table, short_name
from jobs.base.target_facts import compute_device, compute_dtype
from jobs.dataset.samples import load_rows
from jobs.dataset.slices import taus_by_slice
from jobs.evaluate import commit_rows, pick, save_json
from jobs.fleet.server_pool import Servers, require
from jobs.proof.choose_k import BATCHES, CHOICE, choose, predicted
from jobs.proof.measurements import (
    MOST,
    RULE,
    measure,
    pooled_by_vllm,
    speed_domain,
    warn_if_unsteady,
)
from jobs.proof.reference_check import check_reference
from jobs.proof.round_comparison import Comparison, compare, table
from jobs.registry.versions import resolve
from jobs.reporting.page import publish
from jobs.serve import dtype_name, vllm_version
from serving.client import Completion
from serving.greedy import LEVEL, GreedyReport, Reading
from serving.vllm_counts import served_row
from store.files import read_json
from store.ids import drafter_version, short_hash
from store.schemas import ACCEPTANCE
from store.shards import read_dataset

Row = dict[str, Any]
Walks = dict[int, list[list[int]]]
"""Accepted drafts per round of every row, by K."""
SHOWN = 10


def run(cfg: Config) -> dict[str, Any]:
    """Verify the champion; returns (or finds again) the measurements.

    `ok` is false where a limit is exceeded, `faults` says which. Raises ValueError without a
    champion or held-out samples, and where no server fits into memory.
    """
    found = resolve(cfg, "champion")
    if found is None:
        raise ValueError("there is no champion to verify: run `flywheel promote` first")
    version, folder = found
    held_out = load_rows(cfg, cfg.evaluate.split, taps=read_config(folder).target_layer_ids)
    speed_domain(cfg, held_out)  # without a round there is nothing to serve
    sha = drafter_version(drafter_sha256(folder))
    rows, walks = stored_walks(cfg, sha, held_out)
    if len(rows) < len(held_out):
        console.print(f"{len(held_out) - len(rows)} samples were not evaluated and are left out")
    settings = [asdict(cfg.verify), asdict(cfg.serve), dtype_name(cfg), str(compute_dtype(cfg))]
    settings += [target_id(cfg.target_path), vllm_version(), CHOICE, RULE]
    key = short_hash([drafter_sha256(folder), [r["sample_id"] for r in rows], settings])
    path = cfg.path("verified", f"{key}.json")
    if path.is_file() and read_json(path, ["ok", "drafter_sha256", "speedup"])["ok"]:
        return published(cfg, read_json(path, ["ok"])) | {"reused": True}
    result = {
        "stage": "verify",
        "version": str(version),
        "drafter": folder.name,
        "drafter_sha256": drafter_sha256(folder),
        "target_id": target_id(cfg.target_path),
    }
    result |= _verify(cfg, folder, str(version), rows, walks)
    return published(cfg, save_json(path, result)) | {"reused": False}


def published(cfg: Config, result: dict[str, Any]) -> dict[str, Any]:
    """The result with the drafter's page, written again with the served side."""
    return result | {"report": str(publish(cfg, result["drafter_sha256"]))}


def _verify(
    cfg: Config, folder: Path, version: str, rows: list[Row], walks: Walks
) -> dict[str, Any]:
    domain = speed_domain(cfg, rows)
    sha = drafter_version(drafter_sha256(folder))
    taus = {n: tau(pick(rows, walk, domain)) for n, walk in walks.items()}
    by_slice = taus_by_slice(rows, walks)
    have = require(cfg, folder, 1, "verify")
    reference = check_reference(cfg, folder, rows)
    with Servers(cfg, folder, min(have.servers, MOST)) as servers:
        measured = measure(cfg, servers, rows, taus)
    answers, k, costs = measured.answers, measured.k, measured.costs
    commit_served(cfg, rows, answers, sha, read_config(folder).block_size, version)
    compared = compare_served(cfg, folder, rows, answers, k)
    if not compared.rounds:
        raise ValueError("no served answer has a second token: there is no round to compare")
    faults = [*compared.faults(), *text_faults(measured.text), *reference_faults(reference)]
    names = {row["sample_id"]: row for row in rows}
    walked = [names[name] for name in compared.names]
    result = {
        "ok": not faults,
        "faults": faults,
        "k": k,
        "k_by_batch_size": list(measured.chosen),
        "k_by_slice": {
            name: list(choose(of_slice, costs)) for name, of_slice in by_slice.items() if costs
        },
        "speed_domain": domain,
        "predicted": {str(b): predicted(taus, costs, b) for b in BATCHES} if costs else {},
        "costs": [asdict(cost) for cost in costs],
        "reference": reference,
        "tau_recorded": tau(walks[k]),
        "tau_replay": table(walked, compared.replayed, k),
        "tau_served": table(walked, compared.served, k),
        "vllm_mean_acceptance_length": pooled_by_vllm(answers),
        "same_text": {
            "requests": len(compared.names),
            "identical_rounds": compared.identical,
        },
        "comparison": compared.summary(),
        "greedy": greedy_summary(measured.text),
        "requests": len(rows),
        "rounds": compared.rounds,
        "servers_at_once": servers.most,
        "speedup": {str(s.concurrency): s.ratio for s in measured.speeds},
        "speeds": [asdict(s) for s in measured.speeds],
    }
    show(result)
    return result


def compare_served(
    cfg: Config, folder: Path, rows: list[Row], answers: list[Completion], k: int
) -> Comparison:
    """Our side, loaded after the servers are gone: the answers read, replayed, compared."""
    dtype, device = compute_dtype(cfg), compute_device(cfg)
    target = load_target(cfg.target_path, dtype, device)
    drafter = load_drafter(folder, dtype).to(device)
    named = [(row["sample_id"], answer) for row, answer in zip(rows, answers, strict=True)]
    return compare(target, drafter, named, k)


def text_faults(text: GreedyReport) -> list[str]:
    """Why the drafter is not lossless, in words; none if the control explains all differences."""
    if not text.different:
        return []
    gaps = ", ".join("unknown" if d.gap is None else f"{d.gap:.3g}" for d in text.different[:5])
    control, drafted = text.control, text.drafted
    return [
        f"{len(text.different)} greedy texts differ beyond what the plain server explains (gaps "
        f"{gaps}; bound {text.bound:.3g}; read again, {drafted.lost} of {drafted.tokens} tokens "
        f"with the drafter are not its choice, {control.lost} of {control.tokens} of its own, "
        f"chance {text.chance:.2g}, limit {LEVEL:g})"
    ]


def reference_faults(reference: Row) -> list[str]:
    """Where replay is not the reference decoder, near ties of float32 aside."""
    wrong = [one["sample_id"] for one in reference["differing"] if not one["near_tie"]]
    return [f"replay differs from the reference decoder on {', '.join(wrong)}"] if wrong else []


def greedy_summary(text: GreedyReport) -> Row:
    """Drafted against plain, and plain against plain beside it."""
    return {
        "requests": text.requests,
        "identical": text.identical,
        "near_ties": len(text.near_ties),
        "different": len(text.different),
        "differences": [asdict(d) for d in [*text.different, *text.near_ties]],
        "control": reading_summary(text.control),
        "drafted": reading_summary(text.drafted),
        "bound": text.bound,
        "chance": text.chance,
    }


def reading_summary(reading: Reading) -> Row:
    """How many tokens the plain server does not choose when it reads answers again."""
    return {"tokens": reading.tokens, "lost": reading.lost, "largest_gap": reading.largest}


def stored_walks(cfg: Config, sha: str, rows: list[Row]) -> tuple[list[Row], Walks]:
    """The rows that `flywheel evaluate` replayed with this drafter, and their walks for every K.

    Raises ValueError if there is none.
    """
    mine = (pc.field("drafter_version") == sha) & (pc.field("origin") == "replay")
    columns = ["sample_id", "k", "accepted"]
    found = read_dataset(cfg.path("acceptance"), ACCEPTANCE, columns, mine).to_pylist()
    by_key = {(row["k"], row["sample_id"]): row["accepted"] for row in found}
    ks = sorted({k for k, _ in by_key})
    rows = [row for row in rows if ks and (ks[-1], row["sample_id"]) in by_key]
    if not rows:
        raise ValueError(f"drafter {sha} was not replayed on these samples: `flywheel evaluate`")
    return rows, {k: [by_key[k, row["sample_id"]] for row in rows] for k in ks}


def commit_served(
    cfg: Config, rows: list[Row], answers: list[Completion], sha: str, block: int, version: str
) -> list[list[int]]:
    """Publish the served acceptance rows; returns the accepted counts per request."""
    identity = target_id(cfg.target_path)
    found = [
        served_row(
            answer,
            sample_id=row["sample_id"],
            conversation_id=row["conversation_id"],
            domain=row["domain"],
            target_id=identity,
            drafter_version=sha,
            block_size=block,
            temperature=0.0,
            replica=f"verify-v{version}",
        )
        for row, answer in zip(rows, answers, strict=True)
    ]
    inputs = {"drafter_version": sha, "origin": "served", "split": cfg.evaluate.split}
    commit_rows(cfg, found, inputs)
    return [row["accepted"] for row in found]


def show(result: dict[str, Any]) -> None:
    """The tables a person looks at."""
    replayed, counted = result["tau_replay"], result["tau_served"]
    lines = [["pooled", replayed["pooled"], counted["pooled"]]]
    shown = list(replayed["domains"])[:SHOWN]
    lines += [[short_name(n), replayed["domains"][n], counted["domains"][n]] for n in shown]
    pairs = zip(replayed["positions"], counted["positions"], strict=True)
    lines += [[f"draft {i} accepted", a, b] for i, (a, b) in enumerate(pairs, 1)]
    print_table(f"tau, K = {result['k']}", ["slice", "replayed", "served by vLLM"], lines)
    guesses = list(result["predicted"].values())
    if guesses:
        print_table(
            "Predicted speed-up = replayed tau x plain step / round",
            ["K", *(f"batch size {batch}" for batch in result["predicted"])],
            [[k, *(guess[k] for guess in guesses)] for k in guesses[0]],
        )
    k_by_batch = ", ".join(map(str, result["k_by_batch_size"]))
    console.print(f"K chosen for batch size 1, 2, ... (the last for all larger): {k_by_batch}")
    for name, ks in list(result["k_by_slice"].items())[:SHOWN]:
        console.print(f"  {short_name(name)} alone: {', '.join(map(str, ks))}")
    speeds = [
        [
            s["concurrency"],
            median(s["plain"]),
            median(s["drafted"]),
            s["ratio"],
            f"{min(s['ratios']):.2f} .. {max(s['ratios']):.2f}",
        ]
        for s in result["speeds"]
    ]
    titles = ["concurrency", "plain tokens/s", "with drafter", "ratio", "of passes"]
    how = "interleaved passes" if result["servers_at_once"] > 1 else "passes, a server at a time"
    print_table(f"Speed, medians of {how}", titles, speeds)
    warn_if_unsteady("verify", result["speeds"])
    show_evidence(result)


def show_evidence(result: dict[str, Any]) -> None:
    """Rounds and texts: what agrees, what differs and by how much, which limit is exceeded."""
    greedy, compared = result["greedy"], result["comparison"]
    differing = compared["differences"][:SHOWN]
    if differing:
        names = ["request", "round", "anchor", "served", "replayed", "gap"]
        title = f"Rounds that differ ({compared['differing_rounds']}; gap in our logits)"
        print_table(title, names, [[one[name] for name in names] for one in differing])
    console.print(
        f"rounds of {compared['requests']} requests on the text that was served: "
        f"{compared['identical_rounds']} identical, {compared['near_ties']} rounds differ at near "
        f"ties, {compared['differing_rounds'] - compared['near_ties']} otherwise"
    )
    skipped = result["reference"]["skipped"]
    if skipped:
        console.print(f"reference decoder: {skipped}")
    console.print(
        f"greedy text with the drafter: {greedy['identical']} of {greedy['requests']} identical, "
        f"{greedy['near_ties']} near ties, {greedy['different']} different"
    )
    for whose, name in (("its own answers", "control"), ("those with the drafter", "drafted")):
        one = greedy[name]
        console.print(
            f"  the plain server, reading {whose} again, chooses otherwise at {one['lost']} of "
            f"{one['tokens']} tokens (largest gap {one['largest_gap']:.3g})"
        )
    for fault in result["faults"]:
        console.print(f"verify failed: {fault}", style="bold red")


if __name__ == "__main__":
    run_as_module("verify")
