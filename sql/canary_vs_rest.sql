-- Is the canary as good as the rest? The latest numbers of each roll-out, by domain, as the roll-out itself compared
-- them: answers in the same windows of time, among rounds that offered a draft at the same position. difference is
-- in tokens per round, relative to the rest; from low to high is its interval, which stays valid while the roll-out
-- looks at it all the time. `answer` says what the numbers allow.
with rollouts as (
    select number, decided_at, action, to_version, evidence::json as evidence
    from promotions
    where starts_with(action, 'rollout-')
),

canaries as (
    select number as rollout, evidence ->> '$.replica' as replica
    from rollouts
    where action = 'rollout-canary'
),

measured as (
    select
        (evidence ->> '$.rollout')::integer as rollout,
        number,
        decided_at,
        action,
        to_version,
        unnest(from_json(evidence -> '$.verdict.judged', '["json"]')) as judged
    from rollouts
    where json_type(evidence, '$.verdict.judged') = 'ARRAY'
    qualify number = max(number) over (partition by evidence ->> '$.rollout')
),

final as (
    select
        rollout,
        measured.decided_at,
        canaries.replica as canary,
        measured.to_version as version,
        replace(measured.action, 'rollout-', '') as state,
        judged ->> '$.name' as domain,
        (judged ->> '$.conversations[0]')::integer as canary_conversations,
        (judged ->> '$.conversations[1]')::integer as rest_conversations,
        (judged ->> '$.accepted[0]')::double / nullif((judged ->> '$.offered[0]')::double, 0)
            as canary_accept_rate,
        (judged ->> '$.accepted[1]')::double / nullif((judged ->> '$.offered[1]')::double, 0)
            as rest_accept_rate,
        (judged ->> '$.difference')::double as difference,
        (judged ->> '$.low')::double as low,
        (judged ->> '$.high')::double as high,
        (judged ->> '$.tolerance')::double as tolerance,
        judged ->> '$.answer' as answer
    from measured
    left join canaries using (rollout)
)

select
    rollout,
    decided_at,
    canary,
    version,
    state,
    domain,
    canary_conversations,
    rest_conversations,
    canary_accept_rate,
    rest_accept_rate,
    difference,
    low,
    high,
    tolerance,
    answer
from final
order by rollout, domain
