-- A conversation that is on two sides of the selection: a drafter is judged on what it has learned.
-- To do: `flywheel select` again.
select target_id, conversation_id, list_sort(list(distinct split)) as sides, count(*) as samples
from selection
group by target_id, conversation_id
having count(distinct split) > 1
order by target_id, conversation_id
