-- Does a drafter get worse after long prompts? Tau by prompt length in tokens, grouped by powers of two, with its
-- 95 % interval.
with groups as (
    select
        any_value(target_id) as target_id,
        any_value(origin) as origin,
        any_value(drafter_version) as drafter_version,
        any_value(k) as k,
        any_value(temperature) as temperature,
        cast(pow(2, floor(log2(greatest(prompt_tokens, 1)))) as bigint) as prompt_tokens_from,
        count(*) as requests,
        sum(tokens_in_rounds)::double as tokens,
        sum(rounds)::double as rounds
    from acceptance_requests
    group by series, prompt_tokens_from, conversation
),

final as (
    select
        origin,
        drafter_version,
        k,
        temperature,
        prompt_tokens_from,
        2 * prompt_tokens_from as prompt_tokens_below,
        sum(requests)::bigint as requests,
        count(*) as conversations,
        sum(rounds)::bigint as rounds,
        tau_of(tokens, rounds) as tau_tokens_per_round,
        tau_tokens_per_round - half_interval(tokens, rounds) as tau_low,
        tau_tokens_per_round + half_interval(tokens, rounds) as tau_high,
        target_id
    from groups
    group by target_id, origin, drafter_version, k, temperature, prompt_tokens_from
)

select
    origin,
    drafter_version,
    k,
    temperature,
    prompt_tokens_from,
    prompt_tokens_below,
    requests,
    conversations,
    rounds,
    tau_tokens_per_round,
    tau_low,
    tau_high,
    target_id
from final
order by target_id, drafter_version, origin, k, temperature, prompt_tokens_from
