-- How many drafts does production accept? By hour, replica, drafter and domain: the share of the rounds that
-- offered a draft at `position` in which it was accepted. Rounds with fewer drafts (K falls with the load) do not
-- count there, so compare rates at the same position, and never tau where K differs.
-- hours=24: hours up to the newest answer
with since as (
    select max(hour) - to_hours($hours::integer - 1) as hour
    from production_rounds
),

counts as (
    select
        hour,
        target_id,
        replica,
        version,
        drafter_version,
        domain,
        drafted,
        accepted,
        sum(rounds) as rounds
    from production_rounds
    where hour >= (select hour from since)
    group by all
),

positions as (
    select *, unnest(range(1, drafted + 1)) as position
    from counts
),

rates as (
    select
        hour,
        target_id,
        replica,
        version,
        drafter_version,
        position,
        domain_or_all(domain, grouping(domain)) as domain,
        sum(rounds)::bigint as rounds_offered,
        coalesce(sum(rounds) filter (accepted >= position), 0) / sum(rounds) as accept_rate
    from positions
    group by grouping sets (
        (hour, target_id, replica, version, drafter_version, position, domain),
        (hour, target_id, replica, version, drafter_version, position)
    )
),

loads as (
    select
        date_trunc('hour', finished_at) as hour,
        target_id,
        replica,
        version,
        drafter_version,
        domain_or_all(domain, grouping(domain)) as domain,
        count(*) as requests,
        avg(concurrency) as mean_concurrency
    from production_requests
    where finished_at >= (select hour from since)
    group by grouping sets (
        (date_trunc('hour', finished_at), target_id, replica, version, drafter_version, domain),
        (date_trunc('hour', finished_at), target_id, replica, version, drafter_version)
    )
),

final as (
    select rates.*, loads.requests, loads.mean_concurrency
    from rates
    left join loads
        on rates.hour is not distinct from loads.hour
        and rates.target_id is not distinct from loads.target_id
        and rates.replica is not distinct from loads.replica
        and rates.version is not distinct from loads.version
        and rates.drafter_version is not distinct from loads.drafter_version
        and rates.domain is not distinct from loads.domain
)

select
    hour,
    replica,
    version,
    drafter_version,
    domain,
    position,
    requests,
    rounds_offered,
    accept_rate,
    mean_concurrency,
    target_id
from final
order by hour, replica, drafter_version, domain, position
