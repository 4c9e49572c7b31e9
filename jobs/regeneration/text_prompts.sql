-- Conversations of text logs, each once, in the order in which they are answered: the domains in turn, newest
-- first, until their answers have $tokens tokens.
create temp table asked as
with once as (
    select
        text_id,
        conversation_id,
        domain,
        language,
        tenant,
        captured_at,
        consent,
        thinking,
        temperature,
        top_p,
        top_k,
        seed,
        answers,
        answer_tokens
    from texts_rows
    qualify row_number() over (
        partition by text_id order by captured_at desc nulls last, conversation_id, domain
    ) = 1
),

placed as (
    select *, row_number() over (partition by domain order by captured_at desc nulls last, text_id) as place
    from once
)

select *, sum(answer_tokens) over (order by place, domain, text_id) - answer_tokens as tokens_before
from placed
qualify tokens_before < $tokens;
