-- A sample that the selection has twice: it is learned from twice as much.
-- To do: `flywheel select` again.
select target_id, sample_id, count(*) as rows
from selection
group by target_id, sample_id
having count(*) > 1
order by target_id, sample_id
