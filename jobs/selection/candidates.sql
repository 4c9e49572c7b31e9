-- Every sample of the target in traffic_rows, and whether it would be taken. jobs/selection/ranking.py
-- runs this; only narrow columns are read, and sorts spill to disk.

-- Where the window of $days begins. It ends at the newest sample, but a record with a time in the future must not
-- empty it: times that are more than a day after the newest ingest do not count. No clock is read, so the same traffic
-- gives the same window.
create temp table recent as
with ingested as (
    select max(ingested_at) + interval 1 day as last_day from logs_rows where target_id = $target_id
)

select coalesce(max(captured_at) filter (where captured_at <= last_day), max(captured_at)) - to_days($days) as since
from traffic_rows cross join ingested
where target_id = $target_id and $days > 0;

-- One row per sample. Of its rows, the one that names a domain counts, then the earliest.
create temp table samples as
select
    sample_id,
    arg_min(domain, row(domain in (select unnest($unnamed)), captured_at, request_id)) as domain,
    arg_min(tenant, row(tenant is null, captured_at, request_id)) as tenant,
    arg_min(coalesce(nullif(split, ''), split_by_prompt), row(captured_at, request_id)) as side,
    coalesce(any_value(prompt_id), sample_id) as prompt_id,
    max(captured_at) as seen_at,
    any_value(prompt_tokens + output_tokens) as tokens
from traffic_rows
where target_id = $target_id and ($days = 0 or captured_at >= (select since from recent))
group by sample_id;

-- How much is before the window or has no time. It is only counted, so rows of samples are not kept.
create temp table too_old as
with each_sample as (
    select
        min(domain) as domain,
        min(coalesce(nullif(split, ''), split_by_prompt)) as side,
        any_value(prompt_tokens + output_tokens) as tokens
    from traffic_rows
    where target_id = $target_id and $days > 0
    group by sample_id
    having coalesce(max(captured_at) < (select since from recent), true)
)

select domain, side, count(*) as samples, sum(tokens)::bigint as tokens
from each_sample
group by domain, side;

drop table recent;

-- The share of drafts that the serving engine accepted, for samples with enough rounds to tell.
create temp table served as
select sample_id, sum(list_sum(accepted)) / sum(list_sum(drafted)) as share
from acceptance_rows
where target_id = $target_id and origin = 'served'
group by sample_id
having sum(len(accepted)) >= $rounds and sum(list_sum(drafted)) > 0;

-- Reasons that do not depend on the budget, the first that applies.
create temp table judged as
select
    samples.*,
    case
        when side = 'train' and share <= $garbled then 'garbled'
        when side = 'train' and share >= $looping then 'looping'
        when row_number() over (
            partition by domain, prompt_id order by seen_at desc, sample_id
        ) > $per_prompt then 'same_prompt'
    end as reason
from samples left join served using (sample_id);

drop table samples;
drop table served;
