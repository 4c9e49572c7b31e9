-- How are rounds distributed? Share of rounds that accepted exactly 0, 1, ... K drafts.
with rounds as (
    select target_id, origin, drafter_version, k, temperature, unnest(accepted) as accepted
    from acceptance
),

counts as (
    select target_id, origin, drafter_version, k, temperature, accepted, count(*) as rounds
    from rounds
    group by all
),

final as (
    select
        origin,
        drafter_version,
        k,
        temperature,
        accepted,
        rounds,
        rounds / sum(rounds) over (
            partition by target_id, origin, drafter_version, k, temperature
        ) as share_of_rounds,
        target_id
    from counts
)

select
    origin,
    drafter_version,
    k,
    temperature,
    accepted,
    rounds,
    share_of_rounds,
    target_id
from final
order by target_id, drafter_version, origin, k, temperature, accepted
