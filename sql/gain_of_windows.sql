-- What has each window of `flywheel retrain` gained: predicted by replay, and served since? Gains are shares of the
-- tokens per round of the drafter before (0.05: 5 % more); without a drafter before, of plain decoding. Predicted: the
-- evaluation against the champion, with its 95 % interval. Served: production under the new drafter against production
-- under the one before, domain by domain and position by position, at the mix of domains and offered positions that the
-- new drafter met: neither another mix nor another K is a gain. why: what became of the window, and why it did not pay.
with whole as (
    select "window", state, reason, captured_to, seconds, numbers::json as numbers
    from windows
    where step = 'window'
),

evaluated as (
    select
        "window",
        numbers ->> '$.drafter' as after_drafter,
        numbers ->> '$.baseline' as before_drafter,
        coalesce((numbers ->> '$.baseline_tau')::double, 1.0) as before_tau,
        (numbers ->> '$.gain')::double as gain,
        (numbers ->> '$.gain_low')::double as gain_low,
        (numbers ->> '$.gain_high')::double as gain_high
    from (select "window", numbers::json as numbers from windows where step = 'evaluate' and state = 'done')
),

counts as (
    select drafter_version, domain, drafted, accepted, sum(rounds) as rounds
    from production_rounds
    group by all
),

rates as (
    select
        drafter_version,
        domain,
        position,
        sum(rounds) as offered,
        coalesce(sum(rounds) filter (accepted >= position), 0) / sum(rounds) as rate
    from (select *, unnest(range(1, drafted + 1)) as position from counts)
    group by drafter_version, domain, position
),

requests_by_domain as (
    select drafter_version, domain, count(*) as requests, sum(rounds) as rounds
    from production_requests
    where rounds > 0
    group by drafter_version, domain
),

-- Domains that both drafters have served; all of them where there was no drafter before.
shared as (
    select
        e."window",
        e.before_drafter,
        e.after_drafter,
        a.domain,
        a.requests as requests_after,
        b.requests as requests_before,
        a.rounds as rounds_after,
        a.rounds / sum(a.rounds) over (partition by e."window") as share
    from evaluated as e
    join requests_by_domain as a on a.drafter_version = e.after_drafter
    left join requests_by_domain as b on b.drafter_version = e.before_drafter and b.domain = a.domain
    where e.before_drafter is null or b.domain is not null
),

-- Positions that only one of them was offered cannot be compared.
served as (
    select
        shared."window",
        1 + sum(share * a.offered / rounds_after * a.rate) as after_tau,
        1 + sum(share * a.offered / rounds_after * coalesce(b.rate, 0)) as before_tau
    from shared
    join rates as a on a.drafter_version = after_drafter and a.domain = shared.domain
    left join rates as b
        on b.drafter_version = before_drafter and b.domain = shared.domain and b.position = a.position
    where before_drafter is null or b.rate is not null
    group by shared."window"
),

counted as (
    select
        "window",
        sum(requests_before)::bigint as requests_before,
        sum(requests_after)::bigint as requests_after
    from shared
    group by "window"
),

final as (
    select
        whole."window",
        state,
        captured_to,
        list_sum(map_values((numbers -> '$.tokens')::map(varchar, bigint)))::bigint as new_answer_tokens,
        gain / evaluated.before_tau as predicted_gain,
        gain_low / evaluated.before_tau as predicted_low,
        gain_high / evaluated.before_tau as predicted_high,
        served.after_tau / served.before_tau - 1 as served_gain,
        requests_before,
        requests_after,
        case
            when state <> 'promoted' then reason
            when served_gain is null then 'not known yet: production has no rounds of both drafters'
            when served_gain > 0 then 'it paid'
            when len(from_json(numbers -> '$.drifted', '["VARCHAR"]')) = 0
            then 'it did not pay: no domain had drifted when it began'
            when predicted_low <= 0 then 'it did not pay: the predicted gain was not established'
            else 'it did not pay, though a gain was predicted: compare served with replayed acceptance'
        end as why
    from whole
    left join evaluated using ("window")
    left join served using ("window")
    left join counted using ("window")
)

select
    "window",
    state,
    captured_to,
    new_answer_tokens,
    predicted_gain,
    predicted_low,
    predicted_high,
    served_gain,
    requests_before,
    requests_after,
    why
from final
order by "window"
