-- Where do rounds end? The share of rounds in which the draft number `draft` was rejected, in which all
-- drafts were accepted, in which the answer ended first, and in which there was no room for a draft.
with requests as (
    select target_id, origin, drafter_version, k, temperature, accepted, drafted, rounds
    from acceptance
),

walked as (
    select
        target_id,
        origin,
        drafter_version,
        k,
        temperature,
        rounds as last_round,
        generate_subscripts(accepted, 1) as round,
        unnest(accepted) as accepted,
        unnest(drafted) as drafted
    from requests
),

ended as (
    select
        target_id,
        origin,
        drafter_version,
        k,
        temperature,
        case
            when drafted = 0 then 'nothing drafted'
            when accepted = drafted then 'all accepted'
            -- here the end of the answer, not the target, may have ended the round
            when round = last_round then 'answer ended'
            else 'rejected'
        end as ending,
        if(ending = 'rejected', accepted + 1, null) as draft
    from walked
),

counts as (
    select
        target_id, origin, drafter_version, k, temperature, ending, draft, count(*) as rounds
    from ended
    group by all
),

final as (
    select
        origin,
        drafter_version,
        k,
        temperature,
        ending,
        draft,
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
    ending,
    draft,
    rounds,
    share_of_rounds,
    target_id
from final
order by target_id, drafter_version, origin, k, temperature, draft nulls last, ending
