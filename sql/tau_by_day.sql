-- How many tokens does a round of production give, by day, drafter and domain? tau_low to tau_high is a 95 %
-- interval. K falls with the load, and tau with K: look at drafts_per_round before you compare two days, or ask
-- served_acceptance, which compares the same positions.
-- days=30: days up to the newest answer
with newest as (
    select max(hour)::date as day
    from production_rounds
),

parts as (
    select
        any_value(target_id) as target_id,
        day,
        any_value(version) as version,
        any_value(drafter_version) as drafter_version,
        domain,
        conversation_group,
        count(*) as requests,
        sum(tokens_in_rounds) as tokens,
        sum(rounds) as rounds,
        sum(drafts) as drafts
    from production_requests
    where day > (select day - $days::integer from newest)
    group by series, day, domain, conversation_group
),

groups as (
    select
        target_id,
        day,
        version,
        drafter_version,
        domain_or_all(domain, grouping(domain)) as domain,
        sum(requests) as requests,
        sum(tokens)::double as tokens,
        sum(rounds)::double as rounds,
        sum(drafts) as drafts
    from parts
    group by grouping sets (
        (target_id, day, version, drafter_version, domain, conversation_group),
        (target_id, day, version, drafter_version, conversation_group)
    )
),

final as (
    select
        day,
        version,
        drafter_version,
        domain,
        sum(requests)::bigint as requests,
        sum(rounds)::bigint as rounds,
        sum(drafts) / nullif(sum(rounds), 0) as drafts_per_round,
        tau_of(tokens, rounds) as tau,
        half_interval(tokens, rounds) as half,
        target_id
    from groups
    group by target_id, day, version, drafter_version, domain
)

select
    day,
    version,
    drafter_version,
    domain,
    requests,
    rounds,
    drafts_per_round,
    tau as tau_tokens_per_round,
    tau - half as tau_low,
    tau + half as tau_high,
    target_id
from final
order by day, target_id, version, drafter_version, domain
