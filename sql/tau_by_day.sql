-- How many tokens does a round of production give, by day, drafter and domain? tau_low to tau_high is a 95 %
-- interval. K falls with the load, and tau with K: look at drafts_per_round before you compare two days, or ask
-- served_acceptance, which compares the same positions.
-- days=30: days up to the newest answer
with newest as (
    select max(finished_at)::date as day
    from production_requests
),

groups as (
    select
        target_id,
        finished_at::date as day,
        version,
        drafter_version,
        domain_or_all(domain, grouping(domain)) as domain,
        count(*) as requests,
        sum(tokens_in_rounds)::double as tokens,
        sum(rounds)::double as rounds,
        sum(drafts) as drafts
    from production_requests
    where finished_at::date > (select day - $days::integer from newest)
    group by grouping sets (
        (target_id, finished_at::date, version, drafter_version, domain, conversation_group),
        (target_id, finished_at::date, version, drafter_version, conversation_group)
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
        tau_of(tokens, rounds) as tau_tokens_per_round,
        tau_tokens_per_round - half_interval(tokens, rounds) as tau_low,
        tau_tokens_per_round + half_interval(tokens, rounds) as tau_high,
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
    tau_tokens_per_round,
    tau_low,
    tau_high,
    target_id
from final
order by day, target_id, version, drafter_version, domain
