-- Rows of acceptance whose rounds cannot be: another number of accepted than of drafted counts, or more accepted than
-- drafted.
-- To do: `flywheel evaluate` or `flywheel verify` again where log is empty; for a log, ingest it again.
select drafter_version, origin, log, count(*) as rows, min(request_id) as example
from requests_summary
where not sound
group by drafter_version, origin, log
order by rows desc, example
