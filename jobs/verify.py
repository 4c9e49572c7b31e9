"""flywheel verify

The proof: serve the target with the champion, send the held-out prompts again and put the
acceptance that vLLM counted beside the replayed one; compare the greedy text with and without the
drafter; choose K from measured cost and acceptance; measure the speed-up. Results are kept in
<work>/verified.
"""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.compute as pc

from dflash.acceptance import num_rounds, positions, tau
from dflash.checkpoint import drafter_sha256, read_config
from dflash.target import target_id
from jobs.choose_k import BATCHES, CHOICE, Cost, choose, measure_costs, predicted
from jobs.cli import run_as_module
from jobs.config import Config
from jobs.console import console, print_table, short_name, some_names
from jobs.evaluate import commit_rows, domains, pick, save_json
from jobs.reference import check_reference
from jobs.registry import resolve
from jobs.report import publish
from jobs.samples import load_requests
from jobs.serve import served_dtype, server
from jobs.shape import none_of_target
from jobs.slices import SHOWN, taus_by_slice
from serving.acceptance import served_row
from serving.client import Completion, Request, Speed, compare_speed, complete
from serving.greedy import greedy_check
from serving.server import Server
from store.files import read_json
from store.ids import drafter_version, short_hash
from store.schemas import ACCEPTANCE
from store.shards import read_dataset

Row = dict[str, Any]
UNSTEADY = 1.3
"""Ratio of the fastest to the slowest plain pass above which the machine was not quiet."""
TIE_BOUND = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Logit gaps below which two correct engines may choose differently, by compute dtype."""


def run(cfg: Config) -> dict[str, Any]:
    """Verify the champion; returns (or finds again) the measurements.

    Raises ValueError without a champion or held-out samples.
    """
    found = resolve(cfg, "champion")
    if found is None:
        raise ValueError("there is no champion to verify: run `flywheel promote` first")
    version, folder = found
    rows, _ = load_requests(cfg, cfg.evaluate.split)
    settings = [asdict(cfg.verify), asdict(cfg.serve), dtype_name(cfg), target_id(cfg.target_path)]
    settings += [CHOICE]
    key = short_hash([drafter_sha256(folder), [r["sample_id"] for r in rows], settings])
    path = cfg.path("verified", f"{key}.json")
    if path.is_file():
        return published(cfg, read_json(path, ["drafter_sha256", "speedup"])) | {"reused": True}
    result = {
        "stage": "verify",
        "version": str(version),
        "drafter": folder.name,
        "drafter_sha256": drafter_sha256(folder),
        "target_id": target_id(cfg.target_path),
    }
    result |= _verify(cfg, folder, str(version), rows)
    return published(cfg, save_json(path, result)) | {"reused": False}


def published(cfg: Config, result: dict[str, Any]) -> dict[str, Any]:
    """The result with the drafter's page, written again with the served side."""
    return result | {"report": str(publish(cfg, result["drafter_sha256"]))}


def _verify(cfg: Config, folder: Path, version: str, rows: list[Row]) -> dict[str, Any]:
    domain = speed_domain(cfg, rows)
    narrow = [as_request(row) for row in rows if row["domain"] == domain]
    sha = drafter_version(drafter_sha256(folder))
    reference = check_reference(cfg, folder, rows)
    walks = stored_walks(cfg, sha, rows)
    taus = {n: tau(pick(rows, walk, domain)) for n, walk in walks.items()}
    by_slice = taus_by_slice(rows, walks)
    with ExitStack() as running:
        plain, *probes = start_servers(cfg, folder, [[], *probe_ks(cfg, taus)], running)
        wait_until_ready([plain, *probes])
        costs = probe(cfg, plain, probes, narrow)
        chosen = cfg.serve.k or list(choose(taus, costs))
        proof = probes[-1]
        drafted = next((probe for probe in probes if list(probe.k) == chosen), None)
        for idle in probes:
            if idle is not proof and idle is not drafted:
                idle.stop()
        if drafted is None:  # it starts while the proof runs, which is not timed
            [drafted] = start_servers(cfg, folder, [chosen], running)
        answers = complete(
            proof.url, [as_request(r) for r in rows], cfg.verify.concurrency, "served"
        )
        text = greedy_check(
            plain.url, [as_recorded(r) for r in rows], answers, TIE_BOUND[dtype_name(cfg)]
        )
        wait_until_ready([drafted])
        speeds = measure_speeds(cfg, plain.url, drafted.url, narrow)
    k = proof.k[0]
    served = commit_served(cfg, rows, answers, sha, read_config(folder).block_size, version)
    differences = {d.index for d in [*text.near_ties, *text.different]}
    result = {
        "k": k,
        "k_by_batch_size": chosen,
        "k_by_slice": {
            name: list(choose(of_slice, costs)) for name, of_slice in by_slice.items() if costs
        },
        "speed_domain": domain,
        "predicted": {str(b): predicted(taus, costs, b) for b in BATCHES} if costs else {},
        "costs": [asdict(cost) for cost in costs],
        "reference": reference,
        "tau_replay": table(rows, walks[k], k),
        "tau_served": table(rows, served, k),
        "vllm_mean_acceptance_length": pooled_by_vllm(answers),
        "same_text": rounds_agree(rows, walks[k], served, differences),
        "greedy": {
            "requests": text.requests,
            "identical": text.identical,
            "near_ties": len(text.near_ties),
            "different": len(text.different),
            "differences": [asdict(d) for d in [*text.near_ties, *text.different]],
        },
        "requests": len(rows),
        "rounds": num_rounds(served),
        "speedup": {str(s.concurrency): s.ratio for s in speeds},
        "speeds": [asdict(s) for s in speeds],
    }
    show(result)
    return result


def measure_speeds(
    cfg: Config, plain_url: str, drafted_url: str, narrow: list[Request]
) -> list[Speed]:
    """Speed at concurrency 1 and 8 on the first of these requests, a quarter as many at 1."""
    return [
        compare_speed(plain_url, drafted_url, narrow[:count], concurrency, cfg.verify.repeats)
        for concurrency, count in ((1, (cfg.verify.requests + 3) // 4), (8, cfg.verify.requests))
    ]


def speed_domain(cfg: Config, rows: list[Row]) -> str:
    """verify.domain, else the one with the most held-out samples. ValueError if it has none."""
    names = domains(rows)
    if not names:
        what = f"greedy {cfg.evaluate.split} sample of more than one token"
        fix = "send some requests with temperature 0, or set evaluate.split"
        raise none_of_target(cfg, what, fix)
    if not cfg.verify.domain:
        return max(names, key=[row["domain"] for row in rows].count)
    if cfg.verify.domain not in names:
        raise ValueError(
            f"no held-out sample of domain {cfg.verify.domain!r} (verify.domain): "
            f"there are {some_names(names)}"
        )
    return cfg.verify.domain


def serving(cfg: Config, drafter: Path | str, k: list[int]) -> Config:
    """The same server settings for both sides; only the drafter differs.

    No prefix cache: the passes repeat the same prompts, which a cache would answer without prefill,
    for a plain server more of it than for a drafting one. New prompts are what traffic brings.
    """
    args = [*cfg.serve.args, "--no-enable-prefix-caching"]
    return cfg.override("serve", port=0, drafter=str(drafter), k=k, capture="", args=args)


def dtype_name(cfg: Config) -> str:
    """The name of the dtype that vLLM computes in."""
    return str(served_dtype(cfg)).removeprefix("torch.")


def as_request(row: Row) -> Request:
    """The recorded prompt as token ids, with room for the recorded answer.

    A recorded answer that stopped by itself stops again; one cut by length is cut there again.
    Its labels stay here: nothing captures these requests, and not every text can be a header.
    """
    return Request(prompt=list(row["prompt_ids"]), max_tokens=len(row["output_ids"]))


def as_recorded(row: Row) -> Completion:
    """The recorded greedy answer: what the target says without a drafter."""
    return Completion(
        request_id=row["request_id"],
        prompt_ids=list(row["prompt_ids"]),
        output_ids=list(row["output_ids"]),
        text="",
        finish_reason=row["finish_reason"],
        spec=None,
        top_logprobs=[],
        started=0.0,
        seconds=0.0,
        decode_seconds=None,
    )


def stored_walks(cfg: Config, sha: str, rows: list[Row]) -> dict[int, list[list[int]]]:
    """What `flywheel evaluate` replayed for these rows, for every K.

    Raises ValueError if this drafter was not evaluated on all of them.
    """
    mine = (pc.field("drafter_version") == sha) & (pc.field("origin") == "replay")
    columns = ["sample_id", "k", "accepted"]
    found = read_dataset(cfg.path("acceptance"), ACCEPTANCE, columns, mine).to_pylist()
    by_key = {(row["k"], row["sample_id"]): row["accepted"] for row in found}
    ks = sorted({k for k, _ in by_key})
    if not ks or any((ks[-1], row["sample_id"]) not in by_key for row in rows):
        raise ValueError(f"drafter {sha} was not replayed on these samples: `flywheel evaluate`")
    return {k: [by_key[k, row["sample_id"]] for row in rows] for k in ks}


def probe_ks(cfg: Config, taus: dict[int, float]) -> list[list[int]]:
    """The K to start servers for: the largest of serve.k, else a middle one and the largest.

    Acceptance is counted at the last, at one K, so that served rounds can be replayed rounds.
    """
    if cfg.serve.k:
        return [[max(cfg.serve.k)]]
    return [[k] for k in sorted({max(1, max(taus) // 2), max(taus)})]


def start_servers(
    cfg: Config, folder: Path, ks: list[list[int]], running: ExitStack
) -> list[Server]:
    """One server per K (none: no drafter), starting at the same time, stopped with `running`.

    A start is mostly imports on one core; a server that waits for requests costs nothing.
    `wait_until_ready` comes next.
    """
    names = ["-".join(["verify", *(f"k{one}" for one in k)]) if k else "verify-plain" for k in ks]
    servers = [
        server(serving(cfg, folder if k else "", k), f"{name}.log")
        for k, name in zip(ks, names, strict=True)
    ]
    for one in servers:
        running.push(one)  # its exit stops it, and says so if it has died
        one.start()
    return servers


def wait_until_ready(servers: list[Server]) -> None:
    """Return once all of them answer."""
    for one in servers:
        one.wait_until_ready()


def probe(cfg: Config, plain: Server, probes: list[Server], narrow: list[Request]) -> list[Cost]:
    """Costs of a round at the K of the probes; none if serve.k leaves nothing to choose."""
    if cfg.serve.k:
        return []
    return measure_costs(plain.url, {p.k[0]: p.url for p in probes}, narrow)


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


def table(rows: list[Row], accepted: list[list[int]], k: int) -> dict[str, Any]:
    """Tau pooled, per domain, per position."""
    return {
        "pooled": tau(accepted),
        "domains": {name: tau(pick(rows, accepted, name)) for name in domains(rows)},
        "positions": positions(accepted, k),
    }


def pooled_by_vllm(answers: list[Completion]) -> float:
    """VLLM's own pooled figure, drafts behind the end of text included."""
    specs = [a.spec for a in answers if a.spec]
    steps = sum(s["num_spec_steps"] for s in specs)
    return 1 + sum(s["num_accepted_draft_tokens"] for s in specs) / steps


def rounds_agree(
    rows: list[Row], replayed: list[list[int]], served: list[list[int]], differing: set[int]
) -> dict[str, int]:
    """Among requests with the recorded text: how many, and how many walked the same rounds."""
    same = [i for i in range(len(rows)) if i not in differing]
    equal = sum(list(replayed[i]) == list(served[i]) for i in same)
    return {"requests": len(same), "identical_rounds": equal}


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
    print_table("Speed, medians of interleaved passes", titles, speeds)
    warn_if_unsteady("verify", result["speeds"])
    greedy = result["greedy"]
    console.print(
        f"greedy text with the drafter: {greedy['identical']} of {greedy['requests']} identical, "
        f"{greedy['near_ties']} near ties, {greedy['different']} different"
    )


def warn_if_unsteady(stage: str, speeds: list[Row]) -> None:
    """Say so where the passes of the plain server differ too much for ratios to mean something."""
    for s in speeds:
        if max(s["plain"]) > UNSTEADY * min(s["plain"]):
            console.print(
                f"at concurrency {s['concurrency']} the plain server gave "
                f"{min(s['plain']):.0f} to {max(s['plain']):.0f} tokens/s: the machine was busy "
                f"with something else, so these ratios mean little; run `flywheel {stage}` again",
                style="yellow",
            )


if __name__ == "__main__":
    run_as_module("verify")
