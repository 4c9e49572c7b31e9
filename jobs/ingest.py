"""flywheel ingest [ingest.logs=PATH,...]

Request logs -> <work>/traffic. One Ray task per log. The samples of a log are committed under a
name made from its content and the rules, so a rerun reads only logs that are new or have changed.
When a log has grown, its new samples replace those of its shorter version.

Records that are damaged or cannot be trusted are rejected. If their rate is significantly above
ingest.max_reject_rate, nothing is published. Records that are readable but not for this drafter (an
answer of an adapter, of one token, without consent ...) are only counted.
store/rejection_reasons.py lists every reason.
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
from store.log_files import find_logs
from store.log_to_traffic import publish, settle
from store.traffic_table import read_traffic

SHOWN = 5
"""Most file names in one message."""


def run(cfg: Config) -> dict[str, Any]:
    """Ingest every log of `ingest.logs`; returns the summary.

    Raises ValueError for a path that does not exist, for a target.path that is not a model folder,
    for logs without any record, with too many rejected records or with several model names, and
    when no record can be used.
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
    """List the files of each folder whose names are not those of logs."""
    for folder, names in aside.items():
        shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        console.print(f"ignored in {folder}: {len(names)} files not named as logs: {shown}")


def show(
    samples: pa.Table, logs: int, counts: RecordCounts, published: int
) -> dict[str, dict[str, int]]:
    """Print samples by domain and split, and a line about records; returns {domain: {split: n}}."""
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
