"""flywheel ingest [ingest.logs=PATH,...]

Request logs -> <work>/traffic. One Ray task per log; what a log holds is committed under a name
made from its content and the rules, so a rerun reads only logs that are new or have changed. A
grown log replaces what its older state gave.

Records that are damaged or cannot be trusted are rejected; nothing is published while they are
more than ingest.max_reject_rate of all. Records that are readable but not for this drafter (an
adapter's, one token, no consent ...) are counted and never stop anything. store/reasons.py has
every reason.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray

from dflash.identity import legacy_target_id, target_id
from jobs.base.cli import run_as_module
from jobs.base.cluster import cluster
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.dataset.slices import largest_rows
from store.digests import Digest, Digests, digest_log, stamp
from store.ingest_log import ingest_log, publish
from store.log_files import find_logs
from store.log_formats import Rules
from store.reasons import reason_of
from store.shards import read_manifests, sweep
from store.traffic_table import read_traffic

Result = dict[str, Any]
Stamped = tuple[list[int], Digest]
SHOWN = 5  # names and files in a message


def run(cfg: Config) -> dict[str, Any]:
    """Ingest every log of `ingest.logs`; returns the summary.

    Raises ValueError for a path that is not there, a target folder that is none, logs without any
    record, too many rejected records, several model names, or nothing that can be used.
    """
    logs, aside = find_logs(cfg.ingest.logs or [str(cfg.path("capture"))])
    rules = make_rules(cfg)
    traffic, rejects = cfg.path("traffic"), cfg.path("rejects")
    sweep(traffic)
    sweep(rejects)
    kept = Digests(cfg.path("logs.json"))
    with cluster(cfg):
        digested = _digests(kept, logs, traffic)
        unique = {sha: (log, size) for log, (_, (size, sha, _)) in digested.items()}
        jobs = [(log, size, sha, rules, traffic, rejects) for sha, (log, size) in unique.items()]
        results = dict(zip(unique, _each(ingest_log, jobs), strict=True))
    total = sum((Counter(r["counts"]) for r in results.values()), Counter())
    names = sum((Counter(r["names"]) for r in results.values()), Counter())
    _print_aside(aside)
    _print_reasons("Rejected records", total, names, results.values(), "reject:")
    _print_reasons("Not used", total, names, results.values(), "unused:")
    _check(cfg, logs, total, names, results.values())
    published = sum(
        publish(traffic, log, results[sha], prefixes)
        for log, (_, (_, sha, prefixes)) in digested.items()
        if total["accepted"]
    )
    kept.keep(digested)
    samples = read_traffic(traffic, rules.target_id)
    _check_use(cfg, samples.num_rows, total, names)
    return _summary(rules, logs, aside, results, total, samples, published)


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
        former_ids=(legacy_target_id(cfg.target_path),),
        models=tuple(sorted(cfg.ingest.models)),
    )


def _digests(kept: Digests, logs: list[Path], traffic: Path) -> dict[Path, Stamped]:
    """(stamp, digest) of each log; only logs that changed since the last run are read."""
    sizes = {manifest["inputs"]["bytes"] for manifest in read_manifests(traffic)}
    stamps = {log: stamp(log) for log in logs}
    known = {log: kept.get(log) for log in logs}
    unread = [log for log, digest in known.items() if digest is None]
    read = dict(zip(unread, _each(digest_log, [(log, sizes) for log in unread]), strict=True))
    return {log: (stamps[log], known[log] or read[log]) for log in logs}


def _each(function: Any, arguments: list[tuple]) -> list[Any]:
    """Run `function` over argument tuples as Ray tasks, results in order."""
    task = ray.remote(function)
    return ray.get([task.remote(*args) for args in arguments])


def _by_reason(total: Counter[str], kind: str) -> dict[str, int]:
    """Records by reason of one class ("reject:" or "unused:"), the most frequent first."""
    return {
        name.removeprefix(kind): count
        for name, count in total.most_common()
        if name.startswith(kind)
    }


def _named(names: Counter[str], reason: str) -> str:
    """What was found under a reason, with counts: "qwen3-8b (8), llama (4)"."""
    found = _by_reason(names, f"{reason}:")
    shown = ", ".join(f"{name} ({count})" for name, count in [*found.items()][:SHOWN])
    return shown + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")


def _check(
    cfg: Config,
    logs: list[Path],
    total: Counter[str],
    names: Counter[str],
    results: Iterable[Result],
) -> None:
    if not total["records"]:
        shown = ", ".join(str(log) for log in logs[:3]) + (", ..." if len(logs) > 3 else "")
        raise ValueError(
            f"no record in {len(logs)} log file(s): {shown}; has the server answered a request "
            "since capture was switched on? Name other logs with ingest.logs=PATH"
        )
    if len(_by_reason(names, "model:")) > 1 and not cfg.ingest.models:
        others = total["reject:other_model"]
        more = f"; {others} more are by another model than was asked for" if others else ""
        raise ValueError(
            f"the logs hold answers of several models: {_named(names, 'model')}{more}. Only the "
            "target's may be learned from: list the names it answers under in ingest.models, for "
            "instance ingest.models=[NAME]; nothing was published"
        )
    rejected = _by_reason(total, "reject:")
    rate = sum(rejected.values()) / total["records"]
    if rate <= cfg.ingest.max_reject_rate:
        return
    worst = next(iter(rejected))
    example = next(r["examples"][worst] for r in results if worst in r["examples"])
    raise ValueError(
        f"{sum(rejected.values())} of {total['records']} records rejected ({rate:.1%} > "
        f"ingest.max_reject_rate {cfg.ingest.max_reject_rate:.1%}), nothing was published; mostly "
        f"{_meaning(worst, names)}, first at byte {example.rpartition(':')[2]} of "
        f"{example.rpartition(':')[0]}: {reason_of(worst).fix}. All are in {cfg.path('rejects')}"
    )


def _check_use(cfg: Config, samples: int, total: Counter[str], names: Counter[str]) -> None:
    """Logs without anything to learn from are an error, or a note where older traffic is there."""
    if total["accepted"]:
        return
    counts = Counter(_by_reason(total, "unused:") | _by_reason(total, "reject:"))
    worst, count = counts.most_common(1)[0]
    message = (
        f"none of the {total['records']} records can be used; {count} because of "
        f"{_meaning(worst, names)}. What to do: {reason_of(worst).fix}"
    )
    if not samples:
        raise ValueError(message)
    console.print(f"note: {message}")


def _meaning(reason: str, names: Counter[str]) -> str:
    found = _named(names, reason)
    return f"{reason}: {reason_of(reason).meaning}" + (f": {found}" if found else "")


def _print_aside(aside: dict[Path, list[str]]) -> None:
    for folder, names in aside.items():
        shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        console.print(f"left aside in {folder}: {len(names)} that are not named *.jsonl: {shown}")


def _print_reasons(
    title: str, total: Counter[str], names: Counter[str], results: Iterable[Result], kind: str
) -> None:
    found = _by_reason(total, kind)
    if not found:
        return
    first = {reason: at for r in results for reason, at in r["examples"].items()}
    rows = [
        (reason, n, _meaning(reason, names).partition(": ")[2], first[reason])
        for reason, n in found.items()
    ]
    print_table(title, ["reason", "records", "meaning", "for instance (byte)"], rows)


def _summary(
    rules: Rules,
    logs: list[Path],
    aside: dict[Path, list[str]],
    results: dict[str, Result],
    total: Counter[str],
    samples: Any,
    published: int,
) -> dict[str, Any]:
    slices = Counter(zip(samples["domain"].to_pylist(), samples["split"].to_pylist(), strict=True))
    domains = {
        domain: {split: slices[domain, split] for split in ("train", "val", "test")}
        for domain in sorted({domain for domain, _ in slices})
    }
    rows = largest_rows({name: list(splits.values()) for name, splits in domains.items()})
    print_table("Samples in traffic/", ["domain", "train", "val", "test"], rows)
    rejected, unused = _by_reason(total, "reject:"), _by_reason(total, "unused:")
    console.print(
        f"{total['records']} records in {len(logs)} log(s): {total['accepted']} accepted, "
        f"{sum(unused.values())} not used, {sum(rejected.values())} rejected; "
        f"{published} log(s) newly published"
    )
    return {
        "stage": "ingest",
        "target_id": rules.target_id,
        "logs": len(logs),
        "left_aside": sum(len(names) for names in aside.values()),
        "same_content": len(logs) - len(results),
        "reused": sum(r["reused"] for r in results.values()),
        "published": published,
        "records": total["records"],
        "accepted": total["accepted"],
        "not_used": unused,
        "rejected": rejected,
        "finish_reasons": _by_reason(total, "finish:"),
        "samples": samples.num_rows,
        "domains": domains,
    }


if __name__ == "__main__":
    run_as_module("ingest")
