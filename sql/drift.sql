-- Has production drifted? The latest hours against the days before, for each drafter that served in both, by domain. tau_at_k
-- is 1 plus the acceptance rates at the positions 1 to k, each among the rounds that offered a draft there, so
-- K may fall with the load. change_low to change_high is a 95 % interval by how hours and replicas differ. The row
-- (all) splits its change: the part by the mix of domains, and the part within them. A changed mix needs no training.
-- hours=24: the latest hours
-- days=7: days before them
-- k=3: positions that are compared; fewer where no round offered so many
with newest as (
    select max(hour) as hour
    from production_rounds
),

counts as (
    select
        target_id,
        drafter_version,
        domain,
        production_rounds.hour,
        replica,
        production_rounds.hour > newest.hour - to_hours($hours::integer) as is_recent,
        drafted,
        accepted,
        sum(rounds) as rounds
    from production_rounds, newest
    where production_rounds.hour > newest.hour - to_hours($hours::integer) - to_days($days::integer)
    group by all
),

positions as (
    select *, unnest(range(1, least(drafted, $k::integer) + 1)) as position
    from counts
    where drafted > 0
),

-- one row for each hour of a replica: how different they are is the error
rates as (
    select
        target_id,
        drafter_version,
        domain,
        is_recent,
        position,
        hour,
        replica,
        coalesce(sum(rounds) filter (accepted >= position), 0)::double as hits,
        sum(rounds)::double as offered
    from positions
    group by all
),

curves as (
    select
        target_id,
        drafter_version,
        domain,
        is_recent,
        position,
        tau_of(hits, offered) as rate,
        sum(offered) as offered,
        count(*) as units
    from rates
    group by all
),

-- the error of a sum of ratios: what an hour adds to it at all positions together
parts as (
    select
        target_id,
        drafter_version,
        domain,
        is_recent,
        sum((rates.hits - curves.rate * rates.offered) / curves.offered) as residual
    from rates
    join curves using (target_id, drafter_version, domain, is_recent, position)
    group by target_id, drafter_version, domain, is_recent, hour, replica
),

errors as (
    select
        target_id,
        drafter_version,
        domain,
        is_recent,
        count(*) as units,
        sum(residual * residual) * count(*) / nullif(count(*) - 1, 0) as variance
    from parts
    group by all
),

taus as (
    select
        target_id,
        drafter_version,
        domain,
        is_recent,
        1 + sum(rate) as tau,
        max(offered) filter (position = 1) as rounds
    from curves
    group by all
),

sides as (
    select
        target_id,
        drafter_version,
        domain,
        max(tau) filter (not is_recent) as tau_before,
        max(tau) filter (is_recent) as tau_recent,
        coalesce(max(rounds) filter (not is_recent), 0) as rounds_before,
        coalesce(max(rounds) filter (is_recent), 0) as rounds_recent,
        max(variance) filter (not is_recent) as variance_before,
        max(variance) filter (is_recent) as variance_recent,
        min(units) as units
    from taus
    join errors using (target_id, drafter_version, domain, is_recent)
    group by all
),

shares as (
    select
        *,
        rounds_before / sum(rounds_before) over drafter as share_before,
        rounds_recent / sum(rounds_recent) over drafter as share_recent
    from sides
    window drafter as (partition by target_id, drafter_version)
    qualify sum(rounds_before) over drafter > 0 and sum(rounds_recent) over drafter > 0
),

final as (
    select
        drafter_version,
        domain_or_all(domain, grouping(domain)) as domain,
        sum(rounds_recent)::bigint as rounds_recent,
        sum(share_before) as share_before,
        sum(share_recent) as share_recent,
        sum(share_before * tau_before) / nullif(sum(share_before), 0) as tau_at_k_before,
        sum(share_recent * tau_recent) / nullif(sum(share_recent), 0) as tau_at_k_recent,
        tau_at_k_recent - tau_at_k_before as change,
        if(
            min(units) >= 5,
            student(min(units) - 1) * sqrt(
                sum(pow(share_before, 2) * variance_before) / pow(sum(share_before), 2)
                + sum(pow(share_recent, 2) * variance_recent) / pow(sum(share_recent), 2)
            ),
            null
        ) as half,
        -- a domain that is new, or gone, changes the mix
        if(
            grouping(domain) = 1,
            sum((share_recent - share_before) * coalesce(tau_before, tau_recent)),
            null
        ) as change_by_mix,
        if(
            grouping(domain) = 1,
            sum(share_recent * (coalesce(tau_recent, tau_before) - coalesce(tau_before, tau_recent))),
            null
        ) as change_within_domains,
        target_id
    from shares
    group by grouping sets ((target_id, drafter_version, domain), (target_id, drafter_version))
)

select
    drafter_version,
    domain,
    rounds_recent,
    share_before,
    share_recent,
    tau_at_k_before,
    tau_at_k_recent,
    change,
    change - half as change_low,
    change + half as change_high,
    change_by_mix,
    change_within_domains,
    target_id
from final
order by target_id, drafter_version, domain <> '(all)', change
