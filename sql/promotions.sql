-- Who decided what about champions, when, with which numbers and why? The latest decision comes last. Intervals are
-- those of the evaluation. `flywheel history` also shows which drafter came from which.
with decisions as (
    select
        number,
        decided_at,
        who,
        action,
        from_version as champion_before,
        to_version as version,
        to_drafter as drafter_version,
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
        drafter_version,
        (evidence ->> '$.tau.pooled')::double as tau_tokens_per_round,
        (evidence ->> '$.tau.ci[0]')::double as tau_low,
        (evidence ->> '$.tau.ci[1]')::double as tau_high,
        (evidence ->> '$.baseline.delta')::double as gain_tokens_per_round,
        (evidence ->> '$.baseline.delta_ci[0]')::double as gain_low,
        (evidence ->> '$.baseline.delta_ci[1]')::double as gain_high,
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
    drafter_version,
    tau_tokens_per_round,
    tau_low,
    tau_high,
    gain_tokens_per_round,
    gain_low,
    gain_high,
    k_by_batch_size,
    reason
from final
order by number
