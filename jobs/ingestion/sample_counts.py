"""How many samples traffic/ has, by domain: counted by DuckDB over the narrow columns."""

from math import sqrt

from jobs.base.config import Config
from jobs.dataset.database import open_database
from store.digests import Digests

QUERY = """
with samples as (
    select
        sample_id,
        coalesce(
            min(domain) filter (where domain not in ('default', $unnamed)), min(domain)
        ) as domain,
        min(prompt_tokens + output_tokens) as tokens
    from traffic_rows
    where target_id = $target_id
    group by sample_id
)
select domain, count(*) as samples, sum(tokens)::bigint as tokens
from samples
group by domain
order by domain
"""


def count_samples(cfg: Config, target_id: str, kept: Digests) -> dict[str, dict[str, int]]:
    """{domain: {"samples": n, "tokens": n}} of this target, each sample once.

    A sample with several labels counts under the first by name that is not the default. As long as
    traffic/ has the same version, the counts are those in `kept`.
    """
    table = cfg.table("traffic")
    query = {"unnamed": cfg.ingest.default_domain, "target_id": target_id}
    of = query | {"table": str(table.place), "version": table.version()}
    if kept.counted.get("of") != of:
        rows = sum(shard.rows for shard in table.shards().values())
        with open_database(cfg, {"traffic": None}) as connection:
            connection.execute(f"set threads = 1; set memory_limit = '{megabytes(rows)}MB'")
            found = connection.execute(QUERY, query).fetchall()
        domains = {domain: {"samples": n, "tokens": tokens} for domain, n, tokens in found}
        kept.counted = {"of": of, "domains": domains}
    return kept.counted["domains"]


def megabytes(rows: int) -> int:
    """Memory that is enough to group so many rows; DuckDB puts the rest on the disk.

    Measured: 64 MB are too little for 20 million rows, and 128 MB are enough.
    """
    return int(64 * max(1.0, sqrt(rows / 4e6)))
