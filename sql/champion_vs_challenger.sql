-- Is another drafter better than the champion on the same samples? Rows are paired by sample and by everything else
-- that changes acceptance: origin, k, temperature, target. gain_low to gain_high is the 95 % interval of the gain:
-- it excludes 0 if the difference is established.
with champion_rows as (
    select a.*
    from acceptance_requests as a
    join champion as c on a.drafter_version = c.drafter_version
),

challenger_rows as (
    select a.*
    from acceptance_requests as a
    anti join champion as c on a.drafter_version = c.drafter_version
    where a.drafter_version is not null
),

pairs as (
    select
        challenger.drafter_version as challenger,
        origin,
        k,
        temperature,
        target_id,
        champion.domain,
        champion.conversation_group,
        champion.tokens_in_rounds as tokens_before,
        champion.rounds as rounds_before,
        challenger.tokens_in_rounds as tokens,
        challenger.rounds as rounds
    from champion_rows as champion
    join challenger_rows as challenger using (sample_id, origin, k, temperature, target_id)
),

groups as (
    select
        challenger,
        origin,
        k,
        temperature,
        target_id,
        domain_or_all(domain, grouping(domain)) as domain,
        count(*) as pairs,
        sum(tokens_before)::double as tokens_before,
        sum(rounds_before)::double as rounds_before,
        sum(tokens)::double as tokens,
        sum(rounds)::double as rounds,
        -- a win: fewer rounds for the same text
        count(*) filter (rounds < rounds_before) as wins,
        count(*) filter (rounds > rounds_before) as losses
    from pairs
    group by grouping sets (
        (challenger, origin, k, temperature, target_id, domain, conversation_group),
        (challenger, origin, k, temperature, target_id, conversation_group)
    )
),

final as (
    select
        challenger,
        origin,
        k,
        temperature,
        domain,
        sum(pairs)::bigint as pairs,
        tau_of(tokens_before, rounds_before) as champion_tau,
        tau_of(tokens, rounds) as challenger_tau,
        challenger_tau - champion_tau as gain_tokens_per_round,
        half_interval_of_gain(tokens_before, rounds_before, tokens, rounds) as half,
        sum(wins)::bigint as wins,
        sum(losses)::bigint as losses,
        target_id
    from groups
    group by challenger, origin, k, temperature, target_id, domain
)

select
    challenger,
    origin,
    k,
    temperature,
    domain,
    pairs,
    champion_tau,
    challenger_tau,
    gain_tokens_per_round,
    gain_tokens_per_round - half as gain_low,
    gain_tokens_per_round + half as gain_high,
    wins,
    losses,
    target_id
from final
order by target_id, challenger, origin, k, temperature, domain
