-- What takes how much space, and what does it cost? The feature cache by key, and every table; drafters, checkpoints
-- and logs are not in it. Features can be computed again: `flywheel cache` keeps them within a budget, and
-- `flywheel gc` removes old versions of tables, which are not counted here.
-- price_per_gib_month=0.023: what a GiB costs in a month; the default is that of object storage in US dollars
with files as (
    select
        features_key,
        file,
        count(*) as samples,
        sum(n_tokens) as tokens,
        max(file_bytes) as bytes,
        max(harvested_at) as newest
    from features
    group by all
),

kept as (
    select
        'features' as kind,
        features_key as name,
        count(*) as files,
        sum(samples) as rows,
        sum(tokens) as tokens,
        sum(bytes) as bytes,
        max(newest) as newest
    from files
    group by features_key
    union all
    select
        'table' as kind,
        "table" as name,
        count(*) as files,
        sum(rows) as rows,
        null as tokens,
        sum(bytes) as bytes,
        null as newest
    from shards
    group by "table"
),

final as (
    select
        kind,
        name,
        files,
        rows::bigint as rows,
        tokens::bigint as tokens,
        bytes / 1073741824 as gib,
        bytes / tokens as bytes_per_token,
        gib * $price_per_gib_month::double as price_per_month,
        newest
    from kept
)

select
    kind,
    name,
    files,
    rows,
    tokens,
    gib,
    bytes_per_token,
    price_per_month,
    newest
from final
order by gib desc, name
