-- How many drafts does production accept? By hour, replica, drafter and domain: the share of the rounds that
-- offered a draft at `position` in which it was accepted. Rounds with fewer drafts (K falls with the load) do not
-- count there, so compare rates at the same position, and never tau where K differs.
with requests as (
    select
        date_trunc('hour', finished_at) as hour,
        target_id,
        replica,
        version,
        drafter_version,
        domain,
        accepted,
        drafted,
        concurrency,
        list_max(drafted) as most
    from production
),

positions as (
    select *, unnest(range(1, most + 1)) as position
    from requests
),

final as (
    select
        hour,
        replica,
        version,
        drafter_version,
        domain_or_all(domain, grouping(domain)) as domain,
        position,
        count(*) as requests,
        sum(len(list_filter(drafted, lambda d: d >= position))) as rounds_offered,
        accept_rate_offered(accepted, drafted, position) as accept_rate,
        avg(concurrency) as mean_concurrency,
        target_id
    from positions
    group by grouping sets (
        (hour, target_id, replica, version, drafter_version, position, domain),
        (hour, target_id, replica, version, drafter_version, position)
    )
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
