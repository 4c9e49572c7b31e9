-- Loaded before every question. jobs/dataset/queries.py provides the tables of the work folder as
-- NAME_rows, in their latest version. This file adds macros, and views with derived columns. Days are in
-- UTC, whatever the time zone of the machine is.

-- Acceptance length tau: tokens per round, pooled over the rows of the group (a ratio of sums).
create macro tau(accepted) as
    sum(coalesce(list_sum(accepted), 0) + len(accepted)) / nullif(sum(len(accepted)), 0);

-- The same with each sample counted as often as traffic has it: what a fleet serves.
create macro tau_weighted(accepted, repeat_count) as
    sum((coalesce(list_sum(accepted), 0) + len(accepted)) * coalesce(repeat_count, 1))
    / nullif(sum(len(accepted) * coalesce(repeat_count, 1)), 0);

-- The mean of per-request acceptance lengths. It differs from tau, so it has its own name.
create macro tau_macro(accepted) as
    avg(case when len(accepted) > 0 then list_sum(accepted) / len(accepted) + 1 end);

-- Share of all rounds in which draft `k` was accepted (joint rate, as vLLM counts). k starts at 1.
create macro accept_rate_at(accepted, k) as
    sum(len(list_filter(accepted, lambda a: a >= k))) / nullif(sum(len(accepted)), 0);

-- Share of the rounds that offered a draft `k` in which it was accepted. The one rate that compares rows whose K
-- differs from round to round, as in production. k starts at 1.
create macro accept_rate_offered(accepted, drafted, k) as
    sum(len(list_filter(accepted, lambda a: a >= k))) / nullif(sum(len(list_filter(drafted, lambda d: d >= k))), 0);

-- The domain of a group, or '(all)' for the total over all domains. A client's own domain named '(all)' is
-- shown in double quotes.
create macro domain_or_all(domain, is_sum) as
    if(is_sum = 1, '(all)', if(domain = '(all)', '"(all)"', domain));

-- What commands measured: one row per request and origin. Compare rows only where target, k and sampling are the same.
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
    replica,
    coalesce(repeat_count, 1) as repeat_count
from acceptance_rows
where log is null;

-- What production accepted: one row per captured answer with rounds. k is the largest of the server; how many drafts
-- a round offered is in drafted. version is the server's name of the drafter. A log that was captured twice under two
-- names is here twice.
create view production as
select
    request_id,
    sample_id,
    conversation_id,
    drafter_version,
    version,
    target_id,
    replica,
    domain,
    k,
    temperature,
    accepted,
    drafted,
    len(accepted) as rounds,
    coalesce(list_sum(accepted), 0) + len(accepted) as tokens_in_rounds,
    prompt_tokens,
    output_tokens,
    started_at,
    finished_at,
    concurrency,
    log
from acceptance_rows
where log is not null;

-- A label that names no conversation (store/ids.py).
create macro says_nothing(label) as
    label is null
    or starts_with(label, 'prompt-')
    or lower(trim(label)) in (
        '', 'none', 'null', 'nil', 'nan', 'undefined', 'unknown', 'default', 'n/a', '-', '0'
    );

-- One row per sample, however many logs have it: the row with the most labels, of those the earliest
-- (as in store/traffic_table.py). Token lists are not read. split is the side in the selection, null for a
-- sample that is not selected.
create view traffic as
with ranked as (
    select
        * exclude (prompt_ids, output_ids, loss_mask, split, repeat_count),
        sum(repeat_count) over (partition by target_id, sample_id)::integer as repeat_count,
        row_number() over (
            partition by target_id, sample_id
            order by
                says_nothing(conversation_id),
                (domain = 'default')::integer + (language is null)::integer + (tenant is null)::integer,
                captured_at,
                request_id,
                conversation_id
        ) as place
    from traffic_rows
)
select
    sample_id,
    coalesce(selection_rows.conversation_id, ranked.conversation_id) as conversation_id,
    selection_rows.split,
    selection_rows.sample_id is not null as selected,
    ranked.domain,
    source,
    ranked.captured_at,
    target_id,
    ranked.prompt_tokens,
    ranked.output_tokens,
    prompt_id,
    ids_source,
    finish_reason,
    ranked.temperature,
    top_p,
    top_k,
    seed,
    ranked.shaped,
    ranked.thinking,
    ranked.language,
    ranked.tenant,
    ranked.repeat_count,
    request_id,
    log
from ranked left join selection_rows using (target_id, sample_id)
where place = 1;

-- What is learned from and judged on, in the latest selection.
create view selection as select * exclude (loss_mask) from selection_rows;

-- One row per log that traffic has samples of. counts, names and examples are JSON.
create view logs as
select log, path, target_id, bytes, sha256, rules, reading, counts, names, examples, ingested_at
from logs_rows;

-- What was run here, when, by whom, and what came of it. summary is JSON.
create view stages as
select stage, started_at, finished_at, ok, who, summary
from stages_rows;

-- One row per window and step of `flywheel retrain`; step 'window' is about the whole window. numbers is JSON.
create view windows as
select
    "window",
    place,
    step,
    state,
    reason,
    target_id,
    from_version,
    to_version,
    captured_from,
    captured_to,
    started_at,
    seconds,
    numbers
from windows_rows;

create view rejects as
select file, "offset", reason, octet_length(raw) as raw_bytes
from rejects_rows;

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
from promotions_rows;

-- The current champion: the drafter of the latest decision that changed it.
create view champion as
select to_version as version, to_drafter as drafter_version, decided_at
from promotions
where action in ('promote', 'rollback')
qualify row_number() over (order by number desc) = 1;
