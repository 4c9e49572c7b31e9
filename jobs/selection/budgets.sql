-- Which samples are taken within budgets (domain, side, tokens, tenant_tokens), a table made by jobs/selection/ranking.py:
-- the newest of each tenant, then the newest of all. What is refused for its length or its tenant takes no room, so one
-- long sample leaves out itself only. A budget of 0 has no room for any length: that is reason 'budget'.

create temp table decided as
with tenants as (
    select domain, count(distinct tenant) > 1 as several from judged where reason is null group by domain
),

sized as (
    select
        sample_id,
        domain,
        side,
        tenant,
        seen_at,
        judged.tokens,
        budgets.tokens as budget,
        tenant_tokens,
        several and tenant is not null as capped,
        (judged.tokens > budget and budget > 0)
        or (capped and judged.tokens > tenant_tokens and tenant_tokens > 0) as too_long
    from judged join budgets using (domain, side) join tenants using (domain)
    where reason is null
),

by_tenant as (
    select
        sample_id,
        domain,
        side,
        seen_at,
        tokens,
        budget,
        too_long,
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
