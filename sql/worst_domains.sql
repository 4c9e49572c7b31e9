-- Where does production accept least? Domains of the drafters that served in the latest days, the lowest first draft
-- acceptance first: the share of the rounds with a draft in which the first was accepted, which does not depend on K.
-- share_of_rounds is what the domain costs the fleet.
-- days=7: days up to the newest answer
-- min_rounds=1000: domains with fewer rounds are left out
with newest as (
    select max(hour) as hour
    from production_rounds
),

counts as (
    select
        target_id,
        drafter_version,
        domain,
        drafted,
        accepted,
        sum(rounds) as rounds
    from production_rounds
    where hour > (select hour - to_days($days::integer) from newest)
    group by all
),

domains as (
    select
        target_id,
        drafter_version,
        domain,
        sum(rounds) as rounds,
        sum(rounds * drafted) / sum(rounds) as drafts_per_round,
        sum(rounds * (accepted + 1)) / sum(rounds) as tau,
        sum(rounds) filter (accepted >= 1) / nullif(sum(rounds) filter (drafted >= 1), 0)
            as first_draft_accept_rate
    from counts
    group by all
),

final as (
    select
        drafter_version,
        domain,
        rounds::bigint as rounds,
        rounds / sum(rounds) over (partition by target_id, drafter_version) as share_of_rounds,
        drafts_per_round,
        tau as tau_tokens_per_round,
        first_draft_accept_rate,
        target_id
    from domains
    qualify rounds >= $min_rounds::integer
)

select
    drafter_version,
    domain,
    rounds,
    share_of_rounds,
    drafts_per_round,
    tau_tokens_per_round,
    first_draft_accept_rate,
    target_id
from final
order by target_id, drafter_version, first_draft_accept_rate, domain
