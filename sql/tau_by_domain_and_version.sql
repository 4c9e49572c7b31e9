-- How many tokens does a round produce, by drafter and domain? Measured on the same held-out requests: compare rows
-- of the same origin, k and temperature. tau is pooled, tau_low to tau_high is its 95 % interval; tau_weighted
-- counts each sample as often as traffic has it; tau_macro is the mean of requests.
with parts as (
    select
        target_id,
        origin,
        drafter_version,
        k,
        temperature,
        domain,
        conversation,
        count(*) as requests,
        sum(tokens_in_rounds) as tokens,
        sum(rounds) as rounds,
        sum(tokens_in_rounds * repeat_count::bigint) as weighted_tokens,
        sum(rounds * repeat_count::bigint) as weighted_rounds,
        sum(tokens_in_rounds / nullif(rounds, 0)) as taus,
        count(*) filter (rounds > 0) as requests_with_rounds
    from acceptance_requests
    group by all
),

-- a conversation may have several domains
conversations as (
    select
        target_id,
        origin,
        drafter_version,
        k,
        temperature,
        domain_or_all(domain, grouping(domain)) as domain,
        sum(requests) as requests,
        sum(tokens)::double as tokens,
        sum(rounds)::double as rounds,
        sum(weighted_tokens) as weighted_tokens,
        sum(weighted_rounds) as weighted_rounds,
        sum(taus) as taus,
        sum(requests_with_rounds) as requests_with_rounds
    from parts
    group by grouping sets (
        (target_id, origin, drafter_version, k, temperature, domain, conversation),
        (target_id, origin, drafter_version, k, temperature, conversation)
    )
),

final as (
    select
        origin,
        drafter_version,
        k,
        temperature,
        domain,
        sum(requests)::bigint as requests,
        count(*) as conversations,
        sum(rounds)::bigint as rounds,
        tau_of(tokens, rounds) as tau_tokens_per_round,
        tau_tokens_per_round - half_interval(tokens, rounds) as tau_low,
        tau_tokens_per_round + half_interval(tokens, rounds) as tau_high,
        tau_of(weighted_tokens, weighted_rounds) as tau_weighted,
        sum(taus) / nullif(sum(requests_with_rounds), 0) as tau_macro,
        target_id
    from conversations
    group by target_id, origin, drafter_version, k, temperature, domain
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
    tau_low,
    tau_high,
    tau_weighted,
    tau_macro,
    target_id
from final
order by target_id, drafter_version, origin, k, temperature, domain
