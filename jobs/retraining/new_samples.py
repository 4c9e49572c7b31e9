"""Which samples are new: those that a version of traffic/ has and an earlier one lacks."""

from dataclasses import dataclass
from datetime import datetime

from jobs.base.config import Config
from jobs.dataset.database import open_database
from store import windows
from store.windows import Window

# Rows of logs that were there before are old. A log that has grown is a new log with old samples,
# so samples are compared too. Only the ids of new logs are held in memory.
FRESH = """
create temp table fresh as
select
    sample_id,
    arg_min(domain, row(domain in (select unnest($unnamed)), captured_at, request_id)) as domain,
    any_value(output_tokens) as tokens,
    min(captured_at) as first,
    max(captured_at) as last
from traffic_rows
where
    target_id = $target_id
    and not exists (select 1 from known_logs where known_logs.log = traffic_rows.log)
group by sample_id
"""
KNOWN_LOGS = "create temp table known_logs as select distinct log from before_rows"
KNOWN = """
delete from fresh where sample_id in (
    select sample_id from before_rows semi join fresh using (sample_id) where target_id = $target_id
)
"""
COUNTS = """
select domain, count(*), coalesce(sum(tokens), 0)::bigint, min(first), max(last)
from fresh
group by domain
order by domain
"""
OLDER = """
select domain, coalesce(sum(output_tokens), 0)::bigint from before_rows where target_id = $target_id
group by domain order by domain
"""


@dataclass(frozen=True, slots=True)
class New:
    """The new samples. `tokens`: of their answers, by domain; `older`: of all samples before, by
    domain (a sample of two logs counts twice). `first`, `last`: when they were captured.
    """

    before: int | None
    after: int | None
    samples: dict[str, int]
    tokens: dict[str, int]
    older: dict[str, int]
    first: datetime | None
    last: datetime | None
    note: str = ""

    @property
    def total(self) -> int:
        """Answer tokens of all new samples."""
        return sum(self.tokens.values())


def new_since(cfg: Config, target_id: str, known: list[Window]) -> New:
    """The samples of this target in the latest version of traffic/ that came after the watermark of
    these windows.
    """
    after = cfg.table("traffic").version()
    before = windows.watermark(windows.of_target(known, target_id))
    note = _lost(cfg, before, after)
    if note:
        before = None
    table = cfg.table("traffic")
    with open_database(cfg, {"traffic": after}) as connection:
        known_rows = table.schema.empty_table() if before is None else table.dataset(before)
        connection.register("before_rows", known_rows)
        unnamed = ["default", cfg.ingest.default_domain]
        connection.execute(KNOWN_LOGS)
        connection.execute(FRESH, {"target_id": target_id, "unnamed": unnamed})
        connection.execute(KNOWN, {"target_id": target_id})
        rows = connection.execute(COUNTS).fetchall()
        older = connection.execute(OLDER, {"target_id": target_id}).fetchall()
    times = [time for row in rows for time in row[3:] if time is not None]
    return New(
        before=before,
        after=after,
        samples={row[0]: row[1] for row in rows},
        tokens={row[0]: row[2] for row in rows},
        older=dict(older),
        first=min(times, default=None),
        last=max(times, default=None),
        note=note,
    )


def _lost(cfg: Config, before: int | None, after: int | None) -> str:
    """Why the version `before` of traffic/ cannot be compared with; "" if it can."""
    if before is None:
        return ""
    if after is None or after < before:
        return f"traffic/ was made anew since version {before}: all of it counts as new"
    table = cfg.table("traffic")
    live = table.shards(after).keys()
    gone = [name for name in table.shards(before) if name not in live and not table.place.has(name)]
    if not gone:
        return ""
    return (
        f"files of version {before} of traffic/ are gone, as when ingest takes back what must not "
        "be kept: all of traffic/ counts as new"
    )
