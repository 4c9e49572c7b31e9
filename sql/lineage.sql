-- Where does a drafter come from, and what became of it? Everything that the tables have about it, the oldest first:
-- training with its data and base, evaluation, preflight, speed, decisions, and when it served.
-- drafter=: drafter_version, for instance from promotions
with runs as (
    select stage, started_at, finished_at, ok, who, summary::json as summary
    from stages
),

-- a run of train knows its folder, an evaluation which drafter that holds
names as (
    select distinct summary ->> '$.drafter' as name
    from runs
    where stage = 'evaluate' and left(summary ->> '$.drafter_sha256', 12) = $drafter::varchar
),

trained as (
    select
        finished_at as happened_at,
        'train' as event,
        who,
        concat_ws(
            ', ',
            'run ' || (summary ->> '$.name'),
            (summary ->> '$.samples') || ' samples',
            'selection version ' || (summary ->> '$.inputs.selection_version'),
            'features ' || (summary ->> '$.inputs.features'),
            'base ' || coalesce(left(summary ->> '$.base', 12), 'none')
        ) as detail
    from runs
    where stage = 'train' and ok and summary ->> '$.name' in (select name from names)
),

judged as (
    select
        finished_at as happened_at,
        stage as event,
        who,
        case stage
            when 'evaluate' then concat_ws(
                ', ',
                'tau ' || round((summary ->> '$.tau.pooled')::double, 3),
                'gain ' || round((summary ->> '$.baseline.delta')::double, 3)
                || ' over ' || left(summary ->> '$.baseline.drafter_sha256', 12)
            )
            when 'verify' then 'speed-up by concurrency ' || (summary ->> '$.speedup')
            else if(ok, 'passed', 'failed')
        end as detail
    from runs
    where
        stage in ('evaluate', 'preflight', 'verify')
        and left(summary ->> '$.drafter_sha256', 12) = $drafter::varchar
),

decided as (
    select
        decided_at as happened_at,
        action as event,
        who,
        concat_ws(', ', 'version ' || to_version, 'champion before ' || from_version, reason) as detail
    from promotions
    where to_drafter = $drafter::varchar
),

served as (
    select
        max(hour) as happened_at,
        'served' as event,
        null as who,
        concat(
            sum(rounds), ' rounds since ', strftime(min(hour), '%Y-%m-%d %H:%M'), ', tau ',
            round(sum(rounds * (accepted + 1)) / sum(rounds), 3)
        ) as detail
    from production_rounds
    where drafter_version = $drafter::varchar
    having count(*) > 0
),

final as (
    select * from trained
    union all
    select * from judged
    union all
    select * from decided
    union all
    select * from served
)

select happened_at, event, who, detail
from final
order by happened_at, event
