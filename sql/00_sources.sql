-- Loaded before every question. acceptance_rows, reject_rows and promotion_rows are what the manifests
-- publish, traffic_rows what store.traffic_table reads (jobs/sql.py): repeats merged, split by group. Here
-- they get their macros and derived columns.

-- Days are days in UTC, whatever the machine's own zone is.
set timezone = 'UTC';

-- Acceptance length: tokens per round, pooled over the rows of the group (a ratio of sums).
create macro tau(accepted) as
    sum(coalesce(list_sum(accepted), 0) + len(accepted)) / nullif(sum(len(accepted)), 0);

-- The mean of per-request acceptance lengths: another number, so another name.
create macro tau_macro(accepted) as
    avg(case when len(accepted) > 0 then list_sum(accepted) / len(accepted) + 1 end);

-- Share of rounds in which draft `k` was accepted (joint, as vLLM counts): 1-based.
create macro accept_rate_at(accepted, k) as
    sum(len(list_filter(accepted, lambda a: a >= k))) / nullif(sum(len(accepted)), 0);

-- The domain of a group, '(all)' for the sum over them: a client may have called one that, too.
create macro domain_or_all(domain, is_sum) as
    if(is_sum = 1, '(all)', if(domain = '(all)', '"(all)"', domain));

-- One row per request and origin. Rows compare only where target, k and sampling agree.
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

-- One row per sample; counts instead of lists, so that questions stay narrow.
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

-- Samples that harvest left out, per features key; detail is JSON: detail ->> 'wrong'. backend and
-- dtype computed the features, null in rows of before.
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

-- The drafter that serves now: the latest decision that moved the champion.
create view champion as
select to_version as version, to_drafter as drafter_version, decided_at
from promotions
where action in ('promote', 'rollback')
qualify row_number() over (order by number desc) = 1;
