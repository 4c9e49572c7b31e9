-- Does a server accept what replay predicted? Each request that `flywheel verify` served, paired with its replay at
-- the same K. gap is served minus replayed; gap_low to gap_high is its 95 % interval and should contain 0.
-- The same for production, by position: production_vs_replayed.
with served as (
    select *
    from acceptance_requests
    where origin = 'served'
),

replayed as (
    select *
    from acceptance_requests
    where origin = 'replay'
),

pairs as (
    select
        target_id,
        drafter_version,
        served.domain,
        k,
        temperature,
        served.conversation_group,
        replayed.tokens_in_rounds as replayed_tokens,
        replayed.rounds as replayed_rounds,
        served.tokens_in_rounds as served_tokens,
        served.rounds as served_rounds
    from served
    join replayed using (target_id, drafter_version, sample_id, k, temperature)
),

groups as (
    select
        target_id,
        drafter_version,
        k,
        temperature,
        domain_or_all(domain, grouping(domain)) as domain,
        count(*) as pairs,
        sum(replayed_tokens)::double as replayed_tokens,
        sum(replayed_rounds)::double as replayed_rounds,
        sum(served_tokens)::double as served_tokens,
        sum(served_rounds)::double as served_rounds
    from pairs
    group by grouping sets (
        (target_id, drafter_version, k, temperature, domain, conversation_group),
        (target_id, drafter_version, k, temperature, conversation_group)
    )
),

final as (
    select
        drafter_version,
        k,
        temperature,
        domain,
        sum(pairs)::bigint as pairs,
        tau_of(replayed_tokens, replayed_rounds) as replayed_tau,
        tau_of(served_tokens, served_rounds) as served_tau,
        served_tau - replayed_tau as gap_tokens_per_round,
        half_interval_of_gain(replayed_tokens, replayed_rounds, served_tokens, served_rounds) as half,
        target_id
    from groups
    group by target_id, drafter_version, k, temperature, domain
)

select
    drafter_version,
    k,
    temperature,
    domain,
    pairs,
    replayed_tau,
    served_tau,
    gap_tokens_per_round,
    gap_tokens_per_round - half as gap_low,
    gap_tokens_per_round + half as gap_high,
    target_id
from final
order by target_id, drafter_version, k, temperature, domain
