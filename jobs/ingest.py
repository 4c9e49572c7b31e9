"""flywheel ingest [--explain FILE] [ingest.logs=PATH,...]

Request logs -> <work>/traffic, the rounds of captures -> <work>/acceptance, and conversations
without token ids -> <work>/texts, for `flywheel regenerate`. One Ray task per log, on a local disk
or in a bucket. A rerun reads only logs that are new or have changed: what is known of a log goes by
its content and the rules. When a log has grown, its new samples replace those of its shorter
version. docs/how-to/log-formats.md lists the formats.

Records that are damaged or cannot be trusted are rejected. If their rate is significantly above
ingest.max_reject_rate, nothing is published. Records that are readable but not for this drafter (an
answer of an adapter, of one token, without consent ...) are only counted.
store/rejection_reasons.py lists every reason.
"""

from typing import Any

from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.dataset.slices import largest_rows
from jobs.ingestion import explaining
from jobs.ingestion.log_tasks import digests, read_each, tasks
from jobs.ingestion.publishing import Publisher
from jobs.ingestion.record_counts import (
    DRIFT,
    DROPPED,
    FINISH,
    FORMAT,
    REJECT,
    UNUSED,
    RecordCounts,
    check_counts,
    check_use,
    print_dropped,
    print_reasons,
)
from jobs.ingestion.rules import make_rules
from jobs.ingestion.sample_counts import count_samples
from jobs.regeneration import answer_places, kept_tokenizers
from store.digests import Digests
from store.lease import lease
from store.log_files import find_logs
from store.log_states import SHARDED, States

SHOWN = 5
"""Most file names in one message."""


def run(cfg: Config) -> dict[str, Any]:
    """Ingest every log of `ingest.logs`; returns the summary. One process at a time does.

    Raises ValueError for a path that does not exist, for a target.path that is not a model folder,
    for logs without any record, with too many rejected records or with several model names, when no
    record can be used, and when another process is still ingesting after a minute.
    """
    rules = make_rules(cfg)
    logs, aside = find_logs(sources(cfg))
    with lease(cfg.place("leases", "ingest")) as held:
        kept = Digests(cfg.place())
        tables = [cfg.table(name) for name in SHARDED]
        states = States.read(cfg.table("logs"), cfg.place("ingesting"), tables)
        with tasks(cfg) as each:
            digested = digests(each, cfg, kept, logs, states)
            reads = read_each(each, cfg, digested, rules, states)
        kept.keep(digested)
        publisher = Publisher(cfg, held, states)
        publisher.rejects(reads)
        counts = RecordCounts.of(read.state for read in reads)
        print_aside(aside)
        print_reasons("Rejected records", counts, REJECT)
        print_reasons("Not used", counts, UNUSED)
        print_dropped(counts)
        check_counts(cfg, list(logs), counts)
        published = publisher.traffic(reads, counts.total["accepted"] > 0)
        kept_tokenizers.keep(cfg, cfg.target_path)
        domains = count_samples(cfg, rules.target_id, kept)
        kept.keep(digested)
    samples = sum(domain["samples"] for domain in domains.values())
    check_use(samples, counts)
    show(domains, len(logs), counts, published)
    return {
        "stage": "ingest",
        "target_id": rules.target_id,
        "logs": len(logs),
        "left_aside": sum(len(names) for names in aside.values()),
        "same_content": len(logs) - len(reads),
        "reused": sum(read.reused for read in reads),
        "published": published,
        "records": counts.total["records"],
        "accepted": counts.total["accepted"],
        "formats": counts.of_class(FORMAT),
        "texts": counts.total["texts"],
        "prompts": counts.total["prompts"],
        "dropped": counts.of_class(DROPPED),
        "drift": counts.of_class(DRIFT),
        "not_used": counts.of_class(UNUSED),
        "rejected": counts.of_class(REJECT),
        "finish_reasons": counts.of_class(FINISH),
        "samples": samples,
        "domains": domains,
    }


def explain(cfg: Config) -> dict[str, Any]:
    """What is recognised in the logs, and why records are left out; writes nothing."""
    return explaining.explain(cfg)


def sources(cfg: Config) -> list[str]:
    """The logs of the configuration, and those that `flywheel regenerate` wrote."""
    regenerated = answer_places.answer_logs(cfg)
    there = [str(regenerated)] if any(True for _ in regenerated.objects()) else []
    return [*(cfg.ingest.logs or [str(cfg.path("capture"))]), *there]


def print_aside(aside: dict[str, list[str]]) -> None:
    """List the files of each folder whose names are not those of logs."""
    for folder, names in aside.items():
        shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        console.print(f"ignored in {folder}: {len(names)} files not named as logs: {shown}")


def show(
    domains: dict[str, dict[str, int]], logs: int, counts: RecordCounts, published: int
) -> None:
    """Print samples and tokens by domain, and a line about records. `flywheel select` prints the
    split, because it is made over what is selected.
    """
    rows = largest_rows({name: [*numbers.values()] for name, numbers in domains.items()})
    print_table("Samples in traffic/", ["domain", "samples", "tokens"], rows)
    console.print(
        f"{counts.total['records']} records in {logs} log(s): {counts.total['accepted']} accepted, "
        f"{sum(counts.of_class(UNUSED).values())} not used, "
        f"{sum(counts.of_class(REJECT).values())} rejected; {published} log(s) newly published"
    )
    if texts := counts.total["texts"]:
        console.print(
            f"{texts} of them are conversations without token ids: {counts.total['prompts']} "
            "prompts that `flywheel regenerate` asks the target"
        )


if __name__ == "__main__":
    run_as_module("ingest")
