-- How many drafts of a round are accepted? The share of all rounds in which the draft at `position` was
-- accepted, and the share among the rounds in which the draft before it was accepted.
with requests as (
    select origin, drafter_version, k, temperature, accepted, rounds, target_id
    from acceptance
),

positions as (
    select
        origin,
        drafter_version,
        k,
        temperature,
        target_id,
        accepted,
        rounds,
        unnest(range(1, k + 1)) as position
    from requests
),

rates as (
    select
        origin,
        drafter_version,
        k,
        temperature,
        target_id,
        position,
        sum(rounds) as rounds,
        accept_rate_at(accepted, position) as accept_rate
    from positions
    group by all
),

final as (
    select
        origin,
        drafter_version,
        k,
        temperature,
        position,
        rounds,
        accept_rate,
        accept_rate / nullif(coalesce(lag(accept_rate) over drafter, 1), 0) as accept_rate_given_previous,
        target_id
    from rates
    window drafter as (
        partition by target_id, origin, drafter_version, k, temperature
        order by position
    )
)

select
    origin,
    drafter_version,
    k,
    temperature,
    position,
    rounds,
    accept_rate,
    accept_rate_given_previous,
    target_id
from final
order by target_id, drafter_version, origin, k, temperature, position
