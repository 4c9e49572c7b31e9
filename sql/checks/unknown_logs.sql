-- Rows of a log that the table logs does not have: nothing replaces them when the log grows.
-- To do: `flywheel ingest` again.
with known as (
    select 'traffic' as "table", log, count(*) as rows
    from traffic_rows
    group by log
    union all
    select 'acceptance' as "table", log, count(*) as rows
    from production_requests
    group by log
    union all
    select 'rejects' as "table", log, count(*) as rows
    from rejects_rows
    group by log
)

select "table", log, rows
from known
anti join logs using (log)
where log is not null
order by "table", log
