-- Which samples are taken within budgets (domain, side, tokens, tenant_tokens), a table made by jobs/selection/ranking.py:
-- the newest of each tenant, then the newest of all. What is refused for its length or its tenant takes no room, so one
-- long sample leaves out itself only. A budget of 0 has no room for any length: that is reason 'budget'.

create temp table decided as
with shared as (
    select
        judged.*,
        budgets.tokens as budget,
        tenant_tokens,
        tenant is not null and count(distinct tenant) over (partition by domain) > 1 as capped
    from judged join budgets using (domain, side)
    where reason is null
),

sized as (
    select
        *,
        (tokens > budget and budget > 0)
        or (capped and tokens > tenant_tokens and tenant_tokens > 0) as too_long
    from shared
),

by_tenant as (
    select
        *,
        capped and sum(tokens) filter (where not too_long) over (
            partition by domain, side, tenant order by seen_at desc, sample_id rows unbounded preceding
        ) > tenant_tokens as above_share
    from sized
)

select sample_id, domain, side, tokens, reason from judged where reason is not null
union all
select
    sample_id,
    domain,
    side,
    tokens,
    case
        when too_long then 'too_long'
        when above_share then 'tenant_share'
        when sum(tokens) filter (where not too_long and not above_share) over (
            partition by domain, side order by seen_at desc, sample_id rows unbounded preceding
        ) > budget
        then 'budget'
    end
from by_tenant;
