"""What ingest recognises in logs, and why it leaves records out, without writing anything."""

from collections import Counter
from dataclasses import replace
from typing import Any

from jobs.base.config import Config
from jobs.base.console import console, print_table
from jobs.ingestion.rules import make_rules
from store.digests import digest_log
from store.log_files import container, find_logs, on_disk, other_kind
from store.log_formats import NotUsed, Outcome, Reject, Rules, parse_log
from store.rejection_reasons import reason_of

EXAMPLES = 3
"""Records shown for each reason."""
SHOWN = 120
"""Bytes shown of a rejected record."""


def explain(cfg: Config) -> dict[str, Any]:
    """Print, for each log of ingest.logs, how its records follow one another, their formats, and
    the first records of every reason; returns the counts. Without a target folder, token ids are
    not compared with a vocabulary.
    """
    rules = _rules(cfg)
    logs, aside = find_logs(cfg.ingest.logs or [str(cfg.path("capture"))])
    found = {log: _explain(log, rules) for log in logs}
    left = sum(map(len, aside.values()))
    if left:
        console.print(f"{left} other files in these folders are not named as logs")
    return {"stage": "ingest", "explained": found, "left_aside": left}


def _rules(cfg: Config) -> Rules:
    try:
        return replace(make_rules(cfg), text="prompts")
    except ValueError as error:
        console.print(f"note: token ids are not compared with a vocabulary: {error}")
        return Rules("", 2**31, cfg.ingest.default_domain, cfg.ingest.min_output_tokens, 0, 0)


def _explain(log: str, rules: Rules) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    rows: list[tuple[str, ...]] = []
    with on_disk(log) as path:
        kind = other_kind(path)
        layout = kind or container(path)
        if kind is None:
            size, sha256, _ = digest_log(str(path), set())
            for outcome in parse_log(path, size, sha256, rules, log):
                name = outcome["source"] if isinstance(outcome, dict) else outcome.reason
                counts[name] += 1
                if not isinstance(outcome, dict) and counts[name] <= EXAMPLES:
                    rows.append(_shown(outcome))
    known = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    console.print(f"{log}: {layout}; {known or 'no record'}")
    if rows:
        header = ["reason", "at byte or row", "meaning", "found", "begins with"]
        print_table("Left out: the first of each reason", header, rows)
    return {"layout": layout, "records": dict(counts)}


def _shown(outcome: Outcome) -> tuple[str, ...]:
    assert isinstance(outcome, Reject | NotUsed)
    raw = outcome.raw[:SHOWN] if isinstance(outcome, Reject) else b""
    meaning = reason_of(outcome.reason).meaning
    return (
        outcome.reason,
        str(outcome.offset),
        meaning,
        outcome.detail,
        raw.decode("utf-8", "replace"),
    )
