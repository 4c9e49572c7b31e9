"""flywheel ingest [ingest.logs=PATH,...]

Request logs -> <work>/traffic. One Ray task per log; what a log holds is committed under a name
made from its content and the rules, so a rerun reads only logs that are new or have changed. A
grown log replaces what its older state gave.

Records that are damaged or cannot be trusted are rejected; nothing is published while their rate is
established above ingest.max_reject_rate. Records that are readable but not for this drafter (an
adapter's, one token, no consent ...) are counted and never stop anything. store/reasons.py has
every reason.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobs.base.cli import run_as_module
from jobs.base.cluster import cluster
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.dataset.slices import largest_rows
from jobs.ingestion.log_tasks import digests, ingest_each, takes_back
from jobs.ingestion.record_counts import (
    FINISH,
    REJECT,
    UNUSED,
    RecordCounts,
    check_counts,
    check_use,
    print_reasons,
)
from jobs.ingestion.rules import make_rules
from store.digests import Digests
from store.files import sweep
from store.ingest_log import publish, settle
from store.log_files import find_logs
from store.traffic_table import read_traffic

SHOWN = 5
"""Files in a message."""


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
        digested = digests(kept, logs, traffic, rejects)
        results = ingest_each(digested, rules, traffic, rejects)
    for _, (_, sha, prefixes) in digested.values():
        settle(rejects, results[sha], prefixes)
    counts = RecordCounts.of(results.values())
    print_aside(aside)
    print_reasons("Rejected records", counts, REJECT)
    print_reasons("Not used", counts, UNUSED)
    check_counts(cfg, logs, counts)
    published = sum(
        publish(traffic, log, results[sha], prefixes)
        for log, (_, (_, sha, prefixes)) in digested.items()
        if counts.total["accepted"] or takes_back(traffic, results[sha], prefixes)
    )
    kept.keep(digested)
    samples = read_traffic(traffic, rules.target_id)
    check_use(samples.num_rows, counts)
    return {
        "stage": "ingest",
        "target_id": rules.target_id,
        "logs": len(logs),
        "left_aside": sum(len(names) for names in aside.values()),
        "same_content": len(logs) - len(results),
        "reused": sum(r["reused"] for r in results.values()),
        "published": published,
        "records": counts.total["records"],
        "accepted": counts.total["accepted"],
        "not_used": counts.of_class(UNUSED),
        "rejected": counts.of_class(REJECT),
        "finish_reasons": counts.of_class(FINISH),
        "samples": samples.num_rows,
        "domains": show(samples, len(logs), counts, published),
    }


def print_aside(aside: dict[Path, list[str]]) -> None:
    """The files of each folder that are no logs by their names."""
    for folder, names in aside.items():
        shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        console.print(f"left aside in {folder}: {len(names)} that are not named *.jsonl: {shown}")


def show(
    samples: pa.Table, logs: int, counts: RecordCounts, published: int
) -> dict[str, dict[str, int]]:
    """The table of samples by domain and split, which is returned, and a line about records."""
    slices = Counter(zip(samples["domain"].to_pylist(), samples["split"].to_pylist(), strict=True))
    domains = {
        domain: {split: slices[domain, split] for split in ("train", "val", "test")}
        for domain in sorted({domain for domain, _ in slices})
    }
    rows = largest_rows({name: list(splits.values()) for name, splits in domains.items()})
    print_table("Samples in traffic/", ["domain", "train", "val", "test"], rows)
    console.print(
        f"{counts.total['records']} records in {logs} log(s): {counts.total['accepted']} accepted, "
        f"{sum(counts.of_class(UNUSED).values())} not used, "
        f"{sum(counts.of_class(REJECT).values())} rejected; {published} log(s) newly published"
    )
    return domains


if __name__ == "__main__":
    run_as_module("ingest")
