-- One row of every prompt that former targets answered, in the order in which they are answered anew: the domains in
-- turn, newest first, until their former answers have $tokens tokens.
create temp table former as
with of_prompt as (
    select
        sample_id,
        target_id,
        prompt_id,
        domain,
        conversation_id,
        tenant,
        language,
        captured_at,
        temperature,
        top_p,
        top_k,
        seed,
        thinking,
        consent,
        output_tokens
    from traffic_rows
    where target_id not in (select unnest($ours)) and ids_source = 'served'
    qualify
        row_number() over (
            partition by prompt_id
            order by starts_with(conversation_id, 'prompt-'), captured_at desc nulls last, sample_id
        ) = 1
),

placed as (
    select
        *,
        row_number() over (partition by domain order by captured_at desc nulls last, sample_id) as place
    from of_prompt
    where prompt_id not in (
        select prompt_id from traffic_rows
        where target_id in (select unnest($ours)) and ids_source = 'served' and prompt_id is not null
    )
)

select *, sum(output_tokens) over (order by place, domain, sample_id) - output_tokens as tokens_before
from placed
qualify tokens_before < $tokens;
