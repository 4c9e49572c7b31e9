-- Who would gain most from adaptation? Domains of the latest days by saved_rounds_share: the share of all rounds that
-- would be saved if the domain came to the tau that all other domains have together. A hint about where to
-- look, not a forecast: some text is harder to predict. train_tokens is what there is to learn from, selected_tokens
-- what the latest selection takes of it.
-- days=7: days up to the newest answer
with newest as (
    select max(hour) as hour
    from production_rounds
),

counts as (
    select
        target_id,
        drafter_version,
        domain,
        sum(rounds) as rounds,
        sum(rounds * (accepted + 1)) as tokens
    from production_rounds
    where hour > (select hour - to_days($days::integer) from newest)
    group by all
),

compared as (
    select
        *,
        tokens / rounds as tau,
        (sum(tokens) over drafter - tokens) / nullif(sum(rounds) over drafter - rounds, 0)
            as tau_of_others,
        sum(rounds) over drafter as all_rounds
    from counts
    window drafter as (partition by target_id, drafter_version)
),

-- a sample that two logs have counts once
available as (
    select target_id, domain, sum(tokens) as tokens
    from (
        select distinct target_id, domain, sample_id, prompt_tokens + output_tokens as tokens
        from traffic_rows
    )
    group by all
),

selected as (
    select target_id, domain, sum(prompt_tokens + output_tokens) as tokens
    from selection
    where split = 'train'
    group by all
),

final as (
    select
        drafter_version,
        domain,
        compared.rounds::bigint as rounds,
        compared.rounds / all_rounds as share_of_rounds,
        tau as tau_tokens_per_round,
        tau_of_others,
        greatest(0, 1 - tau / tau_of_others) * compared.rounds / all_rounds as saved_rounds_share,
        coalesce(available.tokens, 0)::bigint as train_tokens,
        coalesce(selected.tokens, 0)::bigint as selected_tokens,
        target_id
    from compared
    left join available using (target_id, domain)
    left join selected using (target_id, domain)
)

select
    drafter_version,
    domain,
    rounds,
    share_of_rounds,
    tau_tokens_per_round,
    tau_of_others,
    saved_rounds_share,
    train_tokens,
    selected_tokens,
    target_id
from final
order by target_id, drafter_version, saved_rounds_share desc nulls last, domain
