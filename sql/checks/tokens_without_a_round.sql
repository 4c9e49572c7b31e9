-- Rows of acceptance whose rounds make another number of tokens than the answer has: tau is wrong. The first token of an
-- answer comes from no round.
-- To do: `flywheel evaluate` or `flywheel verify` again where log is empty; for a log, ingest it again.
select drafter_version, origin, log, count(*) as rows, min(request_id) as example
from requests_summary
where sound and rounds > 0 and tokens_in_rounds + 1 <> output_tokens
group by drafter_version, origin, log
order by rows desc, example
