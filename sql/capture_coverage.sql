-- How much of what was captured can be used? By day of ingestion: records in the logs, what became of them, and the
-- share of the used ones whose rounds are known (rounds_share: without them nothing is learned about served
-- acceptance). What a server dropped before it was written is in no log: flywheel_capture_total on its /metrics.
with counted as (
    select
        log,
        ingested_at::date as day,
        bytes,
        coalesce((counts ->> '$.records')::bigint, 0) as records,
        coalesce((counts ->> '$.accepted')::bigint, 0) as used
    from logs
),

reasons as (
    select
        logs.log,
        sum(one.value::bigint) filter (starts_with(one.key, 'unused:')) as not_used,
        sum(one.value::bigint) filter (starts_with(one.key, 'reject:')) as rejected
    from logs, json_each(logs.counts::json) as one
    group by logs.log
),

answers as (
    select log, count(*) as with_rounds
    from production_requests
    group by log
),

final as (
    select
        day,
        count(*) as logs,
        sum(bytes) / 1048576 as mib,
        sum(records)::bigint as records,
        sum(used)::bigint as used,
        coalesce(sum(not_used), 0)::bigint as not_used,
        coalesce(sum(rejected), 0)::bigint as rejected,
        coalesce(sum(with_rounds), 0)::bigint as with_rounds,
        sum(used) / nullif(sum(records), 0) as used_share,
        coalesce(sum(with_rounds), 0) / nullif(sum(used), 0) as rounds_share
    from counted
    left join reasons using (log)
    left join answers using (log)
    group by day
)

select
    day,
    logs,
    mib,
    records,
    used,
    not_used,
    rejected,
    with_rounds,
    used_share,
    rounds_share
from final
order by day
