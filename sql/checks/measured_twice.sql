-- A request that was measured twice in the same way: tau counts it twice.
-- To do: `flywheel evaluate` or `flywheel verify` again; it replaces its rows.
select drafter_version, origin, k, count(*) - count(distinct request_id) as rows, min(request_id) as example
from acceptance_requests
group by target_id, drafter_version, origin, k
having count(*) > count(distinct request_id)
order by rows desc, example
