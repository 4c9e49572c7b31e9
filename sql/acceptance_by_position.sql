-- How many drafts of a round are accepted? The acceptance curve: accept_rate is the share of all rounds in which the
-- draft at `position` was accepted (its sum over positions plus 1 is tau); accept_rate_given_previous is the share
-- among the rounds in which the draft before it was accepted.
with counts as (
    select origin, drafter_version, k, temperature, target_id, accepted, sum(rounds) as rounds
    from acceptance_rounds
    group by all
),

positions as (
    select *, unnest(range(1, k + 1)) as position
    from counts
),

rates as (
    select
        origin,
        drafter_version,
        k,
        temperature,
        target_id,
        position,
        sum(rounds)::bigint as rounds,
        coalesce(sum(rounds) filter (accepted >= position), 0) / sum(rounds) as accept_rate
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
