-- What did each window of `flywheel retrain` do, step by step? The row with step window is about the whole of it: its
-- state is what came of it, its reason says why. captured_from and captured_to are the times of its samples. What it
-- gained: gain_of_windows.
with final as (
    select
        "window",
        place,
        step,
        state,
        started_at,
        seconds / 60 as minutes,
        captured_from,
        captured_to,
        reason
    from windows
)

select
    "window",
    step,
    state,
    started_at,
    minutes,
    captured_from,
    captured_to,
    reason
from final
order by "window", place
