-- Is another drafter better than the champion on the same samples? Rows are paired by sample
-- and by everything else that changes acceptance: origin, k, temperature, target.
with champion_rows as (
    select a.sample_id, a.origin, a.k, a.temperature, a.target_id, a.domain, a.accepted
    from acceptance as a
    join champion as c on a.drafter_version = c.drafter_version
),

challenger_rows as (
    select
        a.sample_id, a.origin, a.k, a.temperature, a.target_id, a.drafter_version, a.accepted
    from acceptance as a
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
        champion.accepted as champion_accepted,
        challenger.accepted as challenger_accepted
    from champion_rows as champion
    join challenger_rows as challenger using (sample_id, origin, k, temperature, target_id)
),

final as (
    select
        challenger,
        origin,
        k,
        temperature,
        domain_or_all(domain, grouping(domain)) as domain,
        count(*) as pairs,
        tau(champion_accepted) as champion_tau,
        tau(challenger_accepted) as challenger_tau,
        tau(challenger_accepted) - tau(champion_accepted) as gain_tokens_per_round,
        -- a win: fewer rounds for the same text
        count(*) filter (len(challenger_accepted) < len(champion_accepted)) as wins,
        count(*) filter (len(challenger_accepted) > len(champion_accepted)) as losses
    from pairs
    group by grouping sets (
        (challenger, origin, k, temperature, domain),
        (challenger, origin, k, temperature)
    )
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
    wins,
    losses
from final
order by challenger, origin, k, temperature, domain
