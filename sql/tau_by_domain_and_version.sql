-- How many tokens does a round produce, by drafter and domain? Measured on the same held-out requests: compare rows
-- of the same origin, k and temperature. tau is pooled, tau_low to tau_high is its 95 % interval; tau_weighted
-- counts each sample as often as traffic has it; tau_macro is the mean of requests.
with totals as (
    select
        series,
        domain_or_all(domain, grouping(domain)) as domain,
        any_value(target_id) as target_id,
        any_value(origin) as origin,
        any_value(drafter_version) as drafter_version,
        any_value(k) as k,
        any_value(temperature) as temperature,
        count(*) as requests,
        count(distinct conversation) as conversations,
        sum(rounds)::bigint as rounds,
        tau_of(tokens_in_rounds, rounds) as tau,
        tau_weighted_of(tokens_in_rounds, rounds, repeat_count) as tau_weighted,
        tau_macro_of(tokens_in_rounds, rounds) as tau_macro
    from acceptance_requests
    group by grouping sets ((series, domain), (series))
),

parts as (
    select
        series,
        domain,
        conversation_group,
        sum(tokens_in_rounds) as tokens,
        sum(rounds) as rounds
    from acceptance_requests
    group by all
),

groups as (
    select
        series,
        domain_or_all(domain, grouping(domain)) as domain,
        sum(tokens)::double as tokens,
        sum(rounds)::double as rounds
    from parts
    group by grouping sets ((series, domain, conversation_group), (series, conversation_group))
),

intervals as (
    select series, domain, half_interval(tokens, rounds) as half
    from groups
    group by series, domain
),

final as (
    select totals.*, intervals.half
    from totals
    join intervals
        on totals.series = intervals.series
        and totals.domain is not distinct from intervals.domain
)

select
    origin,
    drafter_version,
    k,
    temperature,
    domain,
    requests,
    conversations,
    rounds,
    tau as tau_tokens_per_round,
    tau - half as tau_low,
    tau + half as tau_high,
    tau_weighted,
    tau_macro,
    target_id
from final
order by target_id, drafter_version, origin, k, temperature, domain
