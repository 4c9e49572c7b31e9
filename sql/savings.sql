-- What does speculation save? From the latest `flywheel verify` of each drafter: tokens per second without and with it
-- at each concurrency (medians of the passes), and what a million tokens costs. saved_per_hour is what a
-- server that is always this busy saves in an hour: the work of an hour takes 1 / speedup of it.
-- price_per_hour=: what a server costs in an hour, in any currency
with verified as (
    select
        left(summary ->> '$.drafter_sha256', 12) as drafter_version,
        finished_at as verified_at,
        summary::json as summary
    from stages
    where stage = 'verify' and json_type(summary::json, '$.speeds') = 'ARRAY'
    qualify row_number() over (
        partition by summary ->> '$.drafter_sha256'
        order by finished_at desc
    ) = 1
),

speeds as (
    select
        drafter_version,
        verified_at,
        unnest(from_json(summary -> '$.speeds', '["json"]')) as speed
    from verified
),

medians as (
    select
        drafter_version,
        verified_at,
        (speed ->> '$.concurrency')::integer as concurrency,
        list_median(from_json(speed -> '$.plain', '["double"]')) as plain,
        list_median(from_json(speed -> '$.drafted', '["double"]')) as drafted,
        (speed ->> '$.ratio')::double as speedup
    from speeds
),

final as (
    select
        drafter_version,
        verified_at,
        concurrency,
        plain as tokens_per_second_without,
        drafted as tokens_per_second_with,
        speedup,
        $price_per_hour::double / plain / 3600 * 1000000 as price_per_million_without,
        $price_per_hour::double / drafted / 3600 * 1000000 as price_per_million_with,
        $price_per_hour::double * (1 - 1 / speedup) as saved_per_hour
    from medians
)

select
    drafter_version,
    verified_at,
    concurrency,
    tokens_per_second_without,
    tokens_per_second_with,
    speedup,
    price_per_million_without,
    price_per_million_with,
    saved_per_hour
from final
order by drafter_version, concurrency
