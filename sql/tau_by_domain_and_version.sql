-- How many tokens does a round produce, by drafter and domain?
with requests as (
    select
        target_id,
        origin,
        drafter_version,
        k,
        temperature,
        domain,
        conversation_id,
        accepted,
        rounds,
        repeat_count
    from acceptance
),

final as (
    select
        origin,
        drafter_version,
        k,
        temperature,
        domain_or_all(domain, grouping(domain)) as domain,
        count(*) as requests,
        count(distinct conversation_id) as conversations,
        sum(rounds) as rounds,
        tau(accepted) as tau_tokens_per_round,
        tau_weighted(accepted, repeat_count) as tau_weighted,
        tau_macro(accepted) as tau_macro,
        target_id
    from requests
    group by grouping sets (
        (target_id, origin, drafter_version, k, temperature, domain),
        (target_id, origin, drafter_version, k, temperature)
    )
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
    tau_tokens_per_round,
    tau_weighted,
    tau_macro,
    target_id
from final
order by target_id, drafter_version, origin, k, temperature, domain
