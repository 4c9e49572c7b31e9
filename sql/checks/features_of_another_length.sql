-- Features of another number of tokens than their sample has: they were made from something else.
-- To do: delete the folder features/<features_key> and run `flywheel harvest` again.
select f.features_key, count(*) as samples, min(f.sample_id) as example
from features as f
join selection as s using (sample_id)
where f.n_tokens <> s.prompt_tokens + s.output_tokens
group by f.features_key
order by f.features_key
