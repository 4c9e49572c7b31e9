-- Who decided what about champions, when, with which numbers and why? The latest decision comes last.
-- `flywheel history` also shows which drafter came from which.
with decisions as (
    select
        number,
        decided_at,
        who,
        action,
        from_version as champion_before,
        to_version as version,
        to_drafter as drafter,
        evidence::json as evidence,
        reason
    from promotions
),

final as (
    select
        number,
        decided_at,
        who,
        action,
        champion_before,
        version,
        drafter,
        (evidence ->> '$.tau.pooled')::double as tau_tokens_per_round,
        (evidence ->> '$.baseline.delta')::double as gain_tokens_per_round,
        evidence ->> '$.k_by_batch_size' as k_by_batch_size,
        reason
    from decisions
)

select
    number,
    decided_at,
    who,
    action,
    champion_before,
    version,
    drafter,
    tau_tokens_per_round,
    gain_tokens_per_round,
    k_by_batch_size,
    reason
from final
order by number
