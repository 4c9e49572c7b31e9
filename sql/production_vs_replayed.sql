-- Does production accept what replay predicted? By drafter, domain and position, among the rounds that offered a draft
-- there. Replay has held-out requests only, production has all: a difference at every position of a domain means
-- that the domain has changed, or that the held-out requests are unlike it.
with production as (
    select
        target_id,
        drafter_version,
        domain,
        drafted,
        accepted,
        sum(rounds) as rounds
    from production_rounds
    group by all
),

-- every K that was replayed says the same about a position: the largest has all positions
replayed as (
    select
        target_id,
        drafter_version,
        domain,
        drafted,
        accepted,
        sum(rounds) as rounds
    from acceptance_rounds
    where origin = 'replay'
    group by target_id, drafter_version, domain, drafted, accepted, k
    qualify k = max(k) over (partition by target_id, drafter_version)
),

both_sides as (
    select 'production' as side, * from production
    union all
    select 'replay' as side, * from replayed
),

positions as (
    select *, unnest(range(1, drafted + 1)) as position
    from both_sides
),

rates as (
    select
        target_id,
        drafter_version,
        domain_or_all(domain, grouping(domain)) as domain,
        position,
        sum(rounds) filter (side = 'replay') as replayed_rounds,
        sum(rounds) filter (side = 'replay' and accepted >= position) as replayed_hits,
        sum(rounds) filter (side = 'production') as production_rounds,
        sum(rounds) filter (side = 'production' and accepted >= position) as production_hits
    from positions
    group by grouping sets (
        (target_id, drafter_version, domain, position), (target_id, drafter_version, position)
    )
),

final as (
    select
        drafter_version,
        domain,
        position,
        replayed_rounds::bigint as replayed_rounds,
        production_rounds::bigint as production_rounds,
        coalesce(replayed_hits, 0) / replayed_rounds as replayed_accept_rate,
        coalesce(production_hits, 0) / production_rounds as production_accept_rate,
        production_accept_rate - replayed_accept_rate as difference,
        target_id
    from rates
    where replayed_rounds is not null and production_rounds is not null
)

select
    drafter_version,
    domain,
    position,
    replayed_rounds,
    production_rounds,
    replayed_accept_rate,
    production_accept_rate,
    difference,
    target_id
from final
order by target_id, drafter_version, domain, position
