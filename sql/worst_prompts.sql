-- On which held-out prompts does a drafter do worst? Replayed at its largest K, the fewest tokens per round first. Look
-- the prompt up in traffic by sample_id: garbled text, a language or a format that training has not seen.
-- drafter=: drafter_version, for instance from tau_by_domain_and_version
-- min_rounds=16: answers with fewer rounds are left out
-- most=30: rows
with requests as (
    select target_id, sample_id, domain, k, temperature, prompt_tokens, output_tokens, rounds, tokens_in_rounds
    from acceptance_requests
    where origin = 'replay' and drafter_version = $drafter::varchar and rounds >= $min_rounds::integer
    qualify k = max(k) over ()
),

final as (
    select
        sample_id,
        domain,
        k,
        temperature,
        prompt_tokens,
        output_tokens,
        rounds,
        tokens_in_rounds / rounds as tau_tokens_per_round,
        target_id
    from requests
    order by tau_tokens_per_round, sample_id
    limit $most::integer
)

select
    sample_id,
    domain,
    k,
    temperature,
    prompt_tokens,
    output_tokens,
    rounds,
    tau_tokens_per_round,
    target_id
from final
order by tau_tokens_per_round, sample_id
