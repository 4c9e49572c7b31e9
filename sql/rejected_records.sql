-- Why are records not used? All logs together, the most frequent reason first. Class rejected is damage, which counts
-- against ingest.max_reject_rate, and rejects has the bytes; class not used is readable, but not for this
-- drafter. `flywheel ingest` prints what each reason means and what to do.
with found as (
    select
        logs.path,
        if(starts_with(one.key, 'reject:'), 'rejected', 'not used') as class,
        split_part(one.key, ':', 1) as prefix,
        substr(one.key, length(prefix) + 2) as reason,
        one.value::bigint as records,
        logs.examples
    from logs, json_each(logs.counts::json) as one
    where starts_with(one.key, 'reject:') or starts_with(one.key, 'unused:')
),

totals as (
    select sum((counts ->> '$.records')::bigint) as records
    from logs
),

final as (
    select
        found.class,
        found.reason,
        sum(found.records)::bigint as records,
        sum(found.records) / max(totals.records) as share_of_records,
        count(distinct found.path) as logs,
        min(json_value(found.examples::json, '$."' || found.reason || '"') ->> '$') as example
    from found, totals
    group by found.class, found.reason
)

select
    class,
    reason,
    records,
    share_of_records,
    logs,
    example
from final
order by records desc, class, reason
