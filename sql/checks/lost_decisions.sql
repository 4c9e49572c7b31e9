-- Decisions about champions whose number is there twice, or missing before them: rows were deleted or written by hand.
-- To do: compare `flywheel history` with the aliases in MLflow; an earlier version of the table may have the rows
-- (docs/how-to/read-the-tables.md).
with ordered as (
    select number, decided_at, action, lag(number, 1, 0) over (order by number, decided_at) as number_before
    from promotions
)

select number, decided_at, action, number_before
from ordered
where number <> number_before + 1
order by number
