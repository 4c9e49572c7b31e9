-- Loaded before every question. jobs/dataset/queries.py provides the tables. acceptance_rows and
-- reject_rows hold what the manifests publish, promotion_rows the records of promotions, and set_aside_rows
-- the samples that harvest left out. traffic_rows holds what store.traffic_table reads, with repeated
-- samples merged and the split decided by group. This file adds macros, and views with derived columns.

-- Days are in UTC, whatever the time zone of the machine is.
set timezone = 'UTC';

-- Acceptance length tau: tokens per round, pooled over the rows of the group (a ratio of sums).
create macro tau(accepted) as
    sum(coalesce(list_sum(accepted), 0) + len(accepted)) / nullif(sum(len(accepted)), 0);

-- The mean of per-request acceptance lengths. It differs from tau, so it has its own name.
create macro tau_macro(accepted) as
    avg(case when len(accepted) > 0 then list_sum(accepted) / len(accepted) + 1 end);

-- Share of all rounds in which draft `k` was accepted (joint rate, as vLLM counts). k starts at 1.
create macro accept_rate_at(accepted, k) as
    sum(len(list_filter(accepted, lambda a: a >= k))) / nullif(sum(len(accepted)), 0);

-- The domain of a group, or '(all)' for the total over all domains. A client's own domain named '(all)' is
-- shown in double quotes.
create macro domain_or_all(domain, is_sum) as
    if(is_sum = 1, '(all)', if(domain = '(all)', '"(all)"', domain));

-- One row per request and origin. Compare rows only where target, k and sampling are the same.
create view acceptance as
select
    request_id,
    sample_id,
    conversation_id,
    origin,
    drafter_version,
    target_id,
    domain,
    k,
    block_size,
    temperature,
    accepted,
    drafted,
    len(accepted) as rounds,
    coalesce(list_sum(accepted), 0) + len(accepted) as tokens_in_rounds,
    prompt_tokens,
    output_tokens,
    started_at,
    finished_at,
    replica
from acceptance_rows;

-- One row per sample. Token lists are replaced by their lengths, so that questions read less data.
create view traffic as
select
    sample_id,
    conversation_id,
    split,
    domain,
    source,
    captured_at,
    target_id,
    len(prompt_ids) as prompt_tokens,
    len(output_ids) as output_tokens,
    ids_source,
    finish_reason,
    temperature,
    top_p,
    top_k,
    seed,
    shaped,
    thinking,
    language,
    tenant,
    repeat_count,
    request_id
from traffic_rows;

create view rejects as
select file, "offset", reason, octet_length(raw) as raw_bytes
from reject_rows;

-- Samples that harvest left out, per features key. detail is JSON, for example detail ->> 'wrong'. backend
-- and dtype say what computed the features; they are null in older rows.
create view set_aside as
select sample_id, target_id, features_key, domain, reason, detail, tokens, found_at, backend, dtype
from set_aside_rows;

create view promotions as
select
    number,
    decided_at,
    action,
    who,
    model,
    from_version,
    from_drafter,
    to_version,
    to_drafter,
    reason,
    evidence
from promotion_rows;

-- The current champion: the drafter of the latest decision that changed it.
create view champion as
select to_version as version, to_drafter as drafter_version, decided_at
from promotions
where action in ('promote', 'rollback')
qualify row_number() over (order by number desc) = 1;
