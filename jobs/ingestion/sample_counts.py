"""How many samples traffic/ has, by domain: counted by DuckDB over the narrow columns."""

import duckdb

from jobs.base.config import Config
from store.digests import Digests

MEMORY = "256MB"
"""What DuckDB may hold; of more samples it puts the rest on the disk."""
QUERY = """
with samples as (
    select
        sample_id,
        coalesce(
            min(domain) filter (where domain not in ('default', $unnamed)), min(domain)
        ) as domain,
        min(prompt_tokens + output_tokens) as tokens
    from traffic
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
    version = table.version()
    query = {"unnamed": cfg.ingest.default_domain, "target_id": target_id}
    of = query | {"version": version, "table": str(table.place)}
    if kept.counted.get("of") != of:
        scratch = str(cfg.path("duckdb"))
        settings = {"memory_limit": MEMORY, "threads": 2, "temp_directory": scratch}
        with duckdb.connect(config=settings) as connection:
            connection.register("traffic", table.dataset(version))
            rows = connection.execute(QUERY, query).fetchall()
        domains = {domain: {"samples": n, "tokens": tokens} for domain, n, tokens in rows}
        kept.counted = {"of": of, "domains": domains}
    return kept.counted["domains"]
