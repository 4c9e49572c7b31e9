-- How many tokens should a server draft at which load? From the latest `flywheel verify` of each drafter: the predicted
-- speed-up of every K while `batch` requests decode, from measured round times and replayed tau. is_best marks the K
-- with the largest; served_k is what verify chose (k_by_batch_size): 0 drafts where nothing pays.
with verified as (
    select
        summary ->> '$.drafter_sha256' as drafter_sha256,
        finished_at,
        summary::json as summary
    from stages
    where stage = 'verify' and summary ->> '$.drafter_sha256' is not null
    qualify row_number() over (
        partition by summary ->> '$.drafter_sha256'
        order by finished_at desc
    ) = 1
),

batches as (
    select
        left(drafter_sha256, 12) as drafter_version,
        finished_at as verified_at,
        summary,
        batch.key::integer as batch,
        batch.value as by_k
    from verified, json_each(verified.summary, '$.predicted') as batch
),

predictions as (
    select
        drafter_version,
        verified_at,
        batch,
        -- the last one says what holds for all larger batches
        from_json(summary -> '$.k_by_batch_size', '["integer"]') as chosen,
        one.key::integer as k,
        one.value::double as predicted_speedup
    from batches, json_each(batches.by_k) as one
),

final as (
    select
        drafter_version,
        verified_at,
        batch,
        k,
        predicted_speedup,
        predicted_speedup = max(predicted_speedup) over (
            partition by drafter_version, batch
        ) as is_best,
        chosen[least(batch, len(chosen))] as served_k
    from predictions
)

select
    drafter_version,
    verified_at,
    batch,
    k,
    predicted_speedup,
    is_best,
    served_k
from final
order by drafter_version, batch, k
