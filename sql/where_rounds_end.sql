-- Where do rounds end? The share of rounds in which the draft number `draft` was rejected, in which all
-- drafts were accepted, in which the answer ended first, and in which there was no room for a draft.
with ended as (
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
            when last then 'answer ended'
            else 'rejected'
        end as ending,
        if(ending = 'rejected', accepted + 1, null) as draft,
        rounds
    from acceptance_rounds
),

counts as (
    select
        target_id,
        origin,
        drafter_version,
        k,
        temperature,
        ending,
        draft,
        sum(rounds)::bigint as rounds
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
