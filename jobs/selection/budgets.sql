-- Which samples are taken within budgets (domain, side, tokens, tenant_tokens), a table made by jobs/selection/ranking.py:
-- the newest of each tenant, then the newest of all.

create temp table decided as
with by_tenant as (
    select
        judged.*,
        budgets.tokens as budget,
        case
            when count(distinct tenant) over (partition by domain) > 1 and tenant is not null
            then sum(judged.tokens) over (
                partition by domain, side, tenant order by seen_at desc, sample_id rows unbounded preceding
            ) > budgets.tenant_tokens
            else false
        end as above_share
    from judged join budgets using (domain, side)
    where reason is null
)
select sample_id, domain, side, tokens, reason from judged where reason is not null
union all
select sample_id, domain, side, tokens, 'tenant_share' from by_tenant where above_share
union all
select
    sample_id,
    domain,
    side,
    tokens,
    case
        when sum(tokens) over (
            partition by domain, side order by seen_at desc, sample_id rows unbounded preceding
        ) > budget
        then 'budget'
    end
from by_tenant where not above_share;
