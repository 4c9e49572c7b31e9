"""What would be selected and why: every sample of the target with a reason if it is left out.

DuckDB sorts the narrow columns and spills to disk, so memory does not grow with the traffic.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from jobs.base.config import Config
from jobs.dataset.database import open_database

HERE = Path(__file__).parent
ROUNDS = 16
"""Fewest served rounds of a sample that say whether it is garbled or looping."""
REASONS = {
    "": "it is new enough for every budget",
    "too_old": "it is before the window, or has no time (select.days)",
    "garbled": "the served drafter predicts almost nothing of it (select.garbled)",
    "looping": "the served drafter predicts nearly all of it (select.looping)",
    "same_prompt": "newer samples have the same prompt (select.per_prompt)",
    "too_long": "it alone exceeds the budget of its side, or its tenant's share (select.tokens, "
    "domain_tokens, domains, tenant_share)",
    "tenant_share": "its tenant has its share of the budget (select.tenant_share)",
    "budget": "newer samples fill the budget (select.tokens, domain_tokens, domains)",
}
"""Reason -> meaning, in the order in which they are tested."""


AVAILABLE = "select domain, sum(tokens)::bigint from judged where reason is null group by domain"
COUNTS = """
select domain, side, coalesce(reason, '') as reason, count(*) as samples,
    sum(tokens)::bigint as tokens
from decided group by all
union all
select domain, side, 'too_old', samples, tokens from too_old
order by all
"""
TAKEN = "select sample_id from decided where reason is null order by sample_id"


@dataclass(frozen=True)
class Ranking:
    """The decision about each sample of a target."""

    counts: pa.Table
    """One row per domain, side and reason ("": taken), with samples and tokens."""
    budgets: dict[str, int]
    """Most tokens that each domain gets."""
    taken: pa.Array
    """Ids of the samples that are taken, in order."""


def rank(cfg: Config, target_id: str, versions: Mapping[str, int | None]) -> Ranking:
    """Decide about every sample of this target, in these versions of traffic, acceptance, logs."""
    with open_database(cfg, versions) as connection:
        parameters = {
            "target_id": target_id,
            "days": cfg.select.days,
            "unnamed": ["default", cfg.ingest.default_domain],
            "rounds": ROUNDS,
            "garbled": cfg.select.garbled,
            "looping": cfg.select.looping,
            "per_prompt": cfg.select.per_prompt,
        }
        run_script(connection, "candidates.sql", parameters)
        available = dict(connection.sql(AVAILABLE).fetchall())
        budgets = divide(cfg, available)
        connection.register("budgets", side_budgets(cfg, available, budgets))
        run_script(connection, "budgets.sql", {})
        counts = connection.sql(COUNTS).to_arrow_table()
        taken = connection.sql(TAKEN).to_arrow_table()["sample_id"].combine_chunks()
        return Ranking(counts, budgets, taken)


def divide(cfg: Config, available: Mapping[str, int]) -> dict[str, int]:
    """Tokens that each domain may take: what it has, at most its own budget, and so that the sum is
    at most select.tokens. Domains with less than an equal share leave the rest to the others.
    """
    wanted = {name: min(tokens, cfg.select.budget(name)) for name, tokens in available.items()}
    left, found = cfg.select.tokens, {}
    for count, name in enumerate(sorted(wanted, key=lambda name: (wanted[name], name))):
        found[name] = min(wanted[name], left // (len(wanted) - count))
        left -= found[name]
    return found


def side_budgets(cfg: Config, available: Mapping[str, int], granted: Mapping[str, int]) -> pa.Table:
    """Most tokens by domain and side of the split, of all and of one tenant. Each side gets a fixed
    share, so that held-out samples keep their proportion. A domain below its budget is taken whole.
    """
    val, test = cfg.ingest.val_percent / 100, cfg.ingest.test_percent / 100
    shares = {"train": 1 - val - test, "val": val, "test": test}
    rows = []
    for domain, tokens in granted.items():
        whole = tokens == available[domain]
        base = max(tokens, min(cfg.select.budget(domain), cfg.select.tokens)) if whole else tokens
        for side, share in shares.items():
            tenant = int(base * share * cfg.select.tenant_share)
            rows.append([domain, side, tokens if whole else int(tokens * share), tenant])
    names = ["domain", "side", "tokens", "tenant_tokens"]
    kinds = [pa.string(), pa.string(), pa.int64(), pa.int64()]
    columns = list(zip(*rows, strict=True)) or [[]] * 4
    return pa.table([pa.array(c, k) for c, k in zip(columns, kinds, strict=True)], names=names)


def run_script(
    connection: duckdb.DuckDBPyConnection, name: str, parameters: Mapping[str, Any]
) -> None:
    """Run the statements of a file, each with those parameters that it uses."""
    for statement in connection.extract_statements((HERE / name).read_text()):
        used = {key: parameters[key] for key in statement.named_parameters}
        connection.execute(statement, used)
