-- Does a drafter get worse after long prompts? Tau by prompt length in tokens, grouped by powers of two.
with requests as (
    select
        target_id,
        origin,
        drafter_version,
        k,
        temperature,
        conversation_id,
        cast(pow(2, floor(log2(greatest(prompt_tokens, 1)))) as bigint) as prompt_tokens_from,
        accepted,
        rounds
    from acceptance
),

final as (
    select
        origin,
        drafter_version,
        k,
        temperature,
        prompt_tokens_from,
        2 * prompt_tokens_from as prompt_tokens_below,
        count(*) as requests,
        count(distinct conversation_id) as conversations,
        sum(rounds) as rounds,
        tau(accepted) as tau_tokens_per_round,
        target_id
    from requests
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
    target_id
from final
order by target_id, drafter_version, origin, k, temperature, prompt_tokens_from
