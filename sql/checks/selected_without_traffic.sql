-- Selected samples that traffic does not have (any more): they must not be learned from.
-- To do: `flywheel select` again.
select s.target_id, count(*) as samples, min(s.sample_id) as example
from selection as s
anti join traffic_rows as t using (target_id, sample_id)
group by s.target_id
order by s.target_id
