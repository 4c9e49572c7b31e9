-- Loaded before every question. jobs/dataset/queries.py provides the tables of the work folder as
-- NAME_rows, in their latest version, and requests_summary and rounds_summary. This file adds macros, and views with derived columns. Days are in
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

-- The same three from the sums in acceptance_requests and production_requests.
create macro tau_of(tokens_in_rounds, rounds) as
    sum(tokens_in_rounds) / nullif(sum(rounds), 0);

create macro tau_weighted_of(tokens_in_rounds, rounds, repeat_count) as
    sum(tokens_in_rounds * repeat_count::bigint) / nullif(sum(rounds * repeat_count::bigint), 0);

create macro tau_macro_of(tokens_in_rounds, rounds) as
    avg(tokens_in_rounds / nullif(rounds, 0));

-- Student's quantile of a 95 % interval, expanded to 1 / df^3: 2.769 for 4 degrees of freedom (exact: 2.776).
create macro student(df) as
    1.959964 + 2.372271 / df + 2.822505 / pow(df, 2) + 2.555857 / pow(df, 3);

-- The squares of a - q b, summed, where q is the ratio of the sums; and the products of two such.
create macro spread(a, b) as greatest(
    0,
    sum(a * a) - 2 * sum(a) / sum(b) * sum(a * b) + pow(sum(a) / sum(b), 2) * sum(b * b)
);

create macro joint_spread(a, b, c, d) as
    sum(a * c) - sum(c) / sum(d) * sum(a * d) - sum(a) / sum(b) * sum(b * c)
    + sum(a) / sum(b) * sum(c) / sum(d) * sum(b * d);

-- Half of a 95 % interval of the ratio sum(a) / sum(b), by how much its rows differ: one row for each conversation,
-- or group of conversations, as doubles. Null for fewer than 5 rows. It approximates what the gate uses
-- (jobs/evaluation/intervals.py): do not decide by it near a limit of the scale.
create macro half_interval(a, b) as if(
    count(*) filter (b > 0) >= 5,
    student(count(*) filter (b > 0) - 1) * sqrt(
        count(*) filter (b > 0) / (count(*) filter (b > 0) - 1) * spread(a, b)
    ) / sum(b),
    null
);

-- The same of sum(c) / sum(d) - sum(a) / sum(b), where each row has both sides.
create macro half_interval_of_gain(a, b, c, d) as if(
    count(*) filter (b > 0 or d > 0) >= 5,
    student(count(*) filter (b > 0 or d > 0) - 1) * sqrt(
        count(*) filter (b > 0 or d > 0) / (count(*) filter (b > 0 or d > 0) - 1) * greatest(
            0,
            spread(a, b) / pow(sum(b), 2) + spread(c, d) / pow(sum(d), 2)
            - 2 * joint_spread(a, b, c, d) / (sum(b) * sum(d))
        )
    ),
    null
);

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

-- The same two without their lists: sums per request, which are made once (jobs/dataset/shard_sums.py) and read
-- fast. drafts: all drafts of its rounds, most_drafted: of one round. conversation: a number for conversation_id;
-- conversation_group: the same, and from 200,000 requests on one of 128 groups, whose differences say as much. series: a
-- number for origin, target_id, drafter_version, version, k and temperature together, which is grouped faster than
-- those. day: of its end, in UTC. sound: whether its rounds can be.
set variable requests_are_many = (select count(*) >= 200000 from requests_summary);

create macro group_of(conversation, conversation_group) as
    if(getvariable('requests_are_many'), conversation_group, conversation);

create view acceptance_requests as
select
    request_id,
    sample_id,
    conversation,
    group_of(conversation, conversation_group) as conversation_group,
    series,
    origin,
    drafter_version,
    target_id,
    domain,
    k,
    block_size,
    temperature,
    rounds,
    tokens_in_rounds,
    drafts,
    most_drafted,
    sound,
    prompt_tokens,
    output_tokens,
    started_at,
    finished_at,
    day,
    replica,
    repeat_count
from requests_summary
where not production;

create view production_requests as
select
    request_id,
    sample_id,
    conversation,
    group_of(conversation, conversation_group) as conversation_group,
    series,
    drafter_version,
    version,
    target_id,
    replica,
    domain,
    k,
    temperature,
    rounds,
    tokens_in_rounds,
    drafts,
    most_drafted,
    sound,
    prompt_tokens,
    output_tokens,
    started_at,
    finished_at,
    day,
    concurrency,
    log
from requests_summary
where production;

-- How many rounds of such requests offered `drafted` drafts, of which `accepted` were accepted. last: as the last
-- round of their request. hour: in which the request ended.
create view acceptance_rounds as
select origin, drafter_version, target_id, domain, k, temperature, replica, drafted, accepted, last, rounds
from rounds_summary
where not production;

create view production_rounds as
select
    hour,
    drafter_version,
    version,
    target_id,
    domain,
    k,
    temperature,
    replica,
    drafted,
    accepted,
    last,
    rounds
from rounds_summary
where production;

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

-- Conversations of text logs: prompts for `flywheel regenerate`. Their messages are not read.
create view texts as
select
    text_id,
    conversation_id,
    domain,
    language,
    tenant,
    source,
    captured_at,
    model,
    len(answers) as prompts,
    answer_tokens,
    repeat_count,
    log
from texts_rows;

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

-- Where the features of a sample are: one row per sample and features key.
create view features as
select features_key, sample_id, n_tokens, file, row_group, file_bytes, e_tag, harvested_at
from feature_index_rows;

-- The files of every table, in its latest version.
create view shards as select "table", shard, bytes, rows from shards_rows;
