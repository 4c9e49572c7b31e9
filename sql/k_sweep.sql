-- What does a longer draft bring? Replayed tau at every K, by drafter and domain, with its 95 % interval, and what the
-- last draft added (gain_of_last_draft). A draft pays only while its gain exceeds what it costs: k_by_load.
with parts as (
    select
        series,
        any_value(target_id) as target_id,
        any_value(drafter_version) as drafter_version,
        any_value(k) as k,
        any_value(temperature) as temperature,
        domain,
        conversation_group,
        sum(tokens_in_rounds) as tokens,
        sum(rounds) as rounds
    from acceptance_requests
    where origin = 'replay'
    group by series, domain, conversation_group
),

groups as (
    select
        any_value(target_id) as target_id,
        any_value(drafter_version) as drafter_version,
        any_value(k) as k,
        any_value(temperature) as temperature,
        domain_or_all(domain, grouping(domain)) as domain,
        sum(tokens)::double as tokens,
        sum(rounds)::double as rounds
    from parts
    group by grouping sets ((series, domain, conversation_group), (series, conversation_group))
),

taus as (
    select
        target_id,
        drafter_version,
        k,
        temperature,
        domain,
        sum(rounds)::bigint as rounds,
        tau_of(tokens, rounds) as tau,
        half_interval(tokens, rounds) as half
    from groups
    group by all
),

final as (
    select
        drafter_version,
        domain,
        temperature,
        k,
        rounds,
        tau as tau_tokens_per_round,
        tau - half as tau_low,
        tau + half as tau_high,
        (tau - lag(tau) over sweep) / (k - lag(k) over sweep) as gain_of_last_draft,
        target_id
    from taus
    window sweep as (partition by target_id, drafter_version, domain, temperature order by k)
)

select
    drafter_version,
    domain,
    temperature,
    k,
    rounds,
    tau_tokens_per_round,
    tau_low,
    tau_high,
    gain_of_last_draft,
    target_id
from final
order by target_id, drafter_version, domain, temperature, k
