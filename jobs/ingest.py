"""flywheel ingest [ingest.logs=PATH,...]

Request logs -> <work>/traffic. One Ray task per log; what a log holds is committed under a name
made from its content and the rules, so a rerun reads only logs that are new or have grown. A grown
log replaces what its older state gave. Nothing is published while more than ingest.max_reject_rate
of the records are rejected; the rejects themselves are in <work>/rejects at once.
"""

import glob
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray

from dflash.target import target_id
from jobs.cli import run_as_module
from jobs.cluster import cluster
from jobs.config import Config
from jobs.console import console, print_table
from jobs.slices import largest_rows
from store.ingest import ingest_log, publish
from store.logs import REASONS, Rules, digest_log
from store.shards import read_manifests, sweep
from store.traffic import read_traffic


def run(cfg: Config) -> dict[str, Any]:
    """Ingest every log of `ingest.logs`; returns the summary.

    Raises ValueError for a path that is not there, a target folder that is none, logs without any
    record, or more than `ingest.max_reject_rate` rejected records.
    """
    logs = find_logs(cfg.ingest.logs or [str(cfg.path("capture"))])
    rules = make_rules(cfg)
    traffic, rejects = cfg.path("traffic"), cfg.path("rejects")
    sweep(traffic)
    sweep(rejects)
    with cluster(cfg):
        sizes = {manifest["inputs"]["bytes"] for manifest in read_manifests(traffic)}
        digested = _each(digest_log, [(log, sizes) for log in logs])
        unique = {sha: (log, size) for log, (size, sha, _) in zip(logs, digested, strict=True)}
        jobs = [(log, size, sha, rules, traffic, rejects) for sha, (log, size) in unique.items()]
        results = dict(zip(unique, _each(ingest_log, jobs), strict=True))
    total = sum((Counter(r["counts"]) for r in results.values()), Counter())
    _print_rejects(total, results.values())
    _check(cfg, logs, total, results.values())
    published = sum(
        publish(traffic, log, results[sha], prefixes)
        for log, (_, sha, prefixes) in zip(logs, digested, strict=True)
    )
    return _summary(cfg, rules, logs, results, total, published)


def make_rules(cfg: Config) -> Rules:
    """The rules of this configuration, with the target's identity and vocabulary."""
    path = cfg.target_path / "config.json"
    try:
        vocab_size = json.loads(path.read_bytes())["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: no model configuration with a vocab_size. target.path names the folder of "
            "the target; `flywheel target` makes the demo's"
        ) from error
    return Rules(
        target_id=target_id(cfg.target_path),
        vocab_size=vocab_size,
        default_domain=cfg.ingest.default_domain,
        min_output_tokens=cfg.ingest.min_output_tokens,
        val_percent=cfg.ingest.val_percent,
        test_percent=cfg.ingest.test_percent,
    )


def find_logs(patterns: list[str]) -> list[Path]:
    """Log files named by files, folders (their *.jsonl) and globs, each once, sorted."""
    found: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern)
        if path.is_file():
            matches = [path]
        elif path.is_dir():
            matches = list(path.glob("[!.]*.jsonl"))
        else:
            matches = [Path(p) for p in glob.glob(pattern, recursive=True) if Path(p).is_file()]
        if not matches:
            what = "no *.jsonl file in" if path.is_dir() else "no such file, folder or glob:"
            raise ValueError(
                f"ingest.logs: {what} {pattern}; name your logs with ingest.logs=PATH, or capture "
                "traffic with flywheel serve serve.capture=FOLDER"
            )
        found.update(match.resolve() for match in matches)
    return sorted(found)


def _each(function: Any, arguments: list[tuple]) -> list[Any]:
    """Run `function` over argument tuples as Ray tasks, results in order."""
    task = ray.remote(function)
    return ray.get([task.remote(*args) for args in arguments])


def _rejected(total: Counter[str]) -> dict[str, int]:
    """Rejects by reason, the most frequent first."""
    return {
        name.removeprefix("reject:"): count
        for name, count in total.most_common()
        if name.startswith("reject:")
    }


def _check(
    cfg: Config, logs: list[Path], total: Counter[str], results: Iterable[dict[str, Any]]
) -> None:
    if not total["records"]:
        names = ", ".join(str(log) for log in logs[:3]) + (", ..." if len(logs) > 3 else "")
        raise ValueError(
            f"no record in {len(logs)} log file(s): {names}; has the server answered a request "
            "since capture was switched on? Name other logs with ingest.logs=PATH"
        )
    rejected = _rejected(total)
    rate = sum(rejected.values()) / total["records"]
    if rate <= cfg.ingest.max_reject_rate:
        return
    worst = next(iter(rejected))
    example = next(r["examples"][worst] for r in results if worst in r["examples"])
    raise ValueError(
        f"{sum(rejected.values())} of {total['records']} records rejected ({rate:.1%} > "
        f"ingest.max_reject_rate {cfg.ingest.max_reject_rate:.1%}), nothing was published; mostly "
        f"{worst}: {_meaning(worst)}, first at byte {example.rpartition(':')[2]} of "
        f"{example.rpartition(':')[0]}; all of them are in {cfg.path('rejects')}"
    )


def _meaning(reason: str) -> str:
    return REASONS[reason.partition(":")[0]]


def _print_rejects(total: Counter[str], results: Iterable[dict[str, Any]]) -> None:
    rejected = _rejected(total)
    if not rejected:
        return
    first = {reason: at for r in results for reason, at in r["examples"].items()}
    rows = [(name, n, _meaning(name), first[name]) for name, n in rejected.items()]
    print_table("Rejected records", ["reason", "records", "meaning", "for instance (byte)"], rows)


def _summary(
    cfg: Config,
    rules: Rules,
    logs: list[Path],
    results: dict[str, dict[str, Any]],
    total: Counter[str],
    published: int,
) -> dict[str, Any]:
    samples = read_traffic(cfg.path("traffic"), rules.target_id)
    slices = Counter(zip(samples["domain"].to_pylist(), samples["split"].to_pylist(), strict=True))
    domains = {
        domain: {split: slices[domain, split] for split in ("train", "val", "test")}
        for domain in sorted({domain for domain, _ in slices})
    }
    rows = largest_rows({name: list(splits.values()) for name, splits in domains.items()})
    print_table("Samples in traffic/", ["domain", "train", "val", "test"], rows)
    console.print(
        f"{total['records']} records in {len(logs)} log(s): {total['accepted']} accepted, "
        f"{sum(_rejected(total).values())} rejected, {total['no_consent']} without consent; "
        f"{published} log(s) newly published"
    )
    finish = {k.removeprefix("finish:"): n for k, n in total.items() if k.startswith("finish:")}
    return {
        "stage": "ingest",
        "target_id": rules.target_id,
        "logs": len(logs),
        "same_content": len(logs) - len(results),
        "reused": sum(r["reused"] for r in results.values()),
        "published": published,
        "records": total["records"],
        "accepted": total["accepted"],
        "no_consent": total["no_consent"],
        "rejected": _rejected(total),
        "finish_reasons": finish,
        "samples": samples.num_rows,
        "domains": domains,
    }


if __name__ == "__main__":
    run_as_module("ingest")
