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

-- The share of drafts that the serving engine accepted, for samples with enough rounds to tell, and the share that
-- the same drafters get over all of the sample's domain. A drafter that has not learned a domain accepts almost nothing
-- of it, and one that knows a narrow domain by heart accepts nearly all: neither makes a sample an outlier.
create temp table served as
with requests as (
    select
        sample_id,
        drafter_version,
        domain,
        list_sum(accepted) as accepted,
        list_sum(drafted) as drafted,
        len(accepted) as rounds
    from acceptance_rows
    where target_id = $target_id and origin = 'served' and len(accepted) > 0
),

domains as (
    select drafter_version, domain, sum(accepted) / sum(drafted) as usual
    from requests
    group by drafter_version, domain
    having sum(drafted) > 0
)

select
    sample_id,
    sum(accepted) / sum(drafted) as share,
    sum(usual * drafted) / sum(drafted) as usual
from requests join domains
    on requests.drafter_version is not distinct from domains.drafter_version
    and requests.domain is not distinct from domains.domain
group by sample_id
having sum(rounds) >= $rounds and sum(drafted) > 0;

-- Reasons that do not depend on the budget, the first that applies.
create temp table judged as
select
    samples.*,
    case
        when side = 'train' and share <= $garbled and usual > 5 * $garbled then 'garbled'
        when side = 'train' and share >= $looping and 1 - usual > 5 * (1 - $looping) then 'looping'
        when row_number() over (
            partition by domain, prompt_id order by seen_at desc, sample_id
        ) > $per_prompt then 'same_prompt'
    end as reason
from samples left join served using (sample_id);

drop table samples;
drop table served;
