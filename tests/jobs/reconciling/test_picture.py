"""The picture of a roll-out: what was seen of each slice, and why it ended."""

from jobs.reconciling.picture import looks
from jobs.reporting.plotting import sequential_intervals


def row(action, answers, *judged):
    names = ("name", "conversations", "difference", "low", "high", "tolerance")
    verdict = {"answers": answers, "judged": [dict(zip(names, j, strict=True)) for j in judged]}
    return {"action": action, "evidence": {"verdict": verdict}}


ROWS = [
    row("rollout-measure", (20, 21), ("a", (20, 21), 0.1, -0.1, 0.3, 0.2)),
    row(
        "rollout-hold",
        (50, 40),
        ("a", (30, 22), 0.2, 0.1, 0.3, 0.2),
        ("short of data", (19, 18), None, None, None, 0.4),
        ("without traffic", (0, 0), None, None, None, 0.4),
    ),
    {"action": "rollout-advance", "evidence": None},
]


def test_a_slice_that_is_waited_for_is_there_without_looks():
    panels, tolerances = looks(ROWS)
    assert panels == {"a": [(20, 0.1, -0.1, 0.3), (50, 0.2, 0.1, 0.3)], "short of data": []}
    assert tolerances == {"a": 0.2, "short of data": 0.4}


def test_the_picture_says_why_and_takes_names_as_text():
    panels, tolerances = looks(ROWS)
    panels["<b>$x$"], tolerances["<b>$x$"] = [(20, -0.5, -0.6, -0.4)], 0.2
    svg = sequential_intervals("version 7 held: too little\x1b data", panels, tolerances)
    assert "version 7 held" in svg
    assert svg.count("too few conversations for an interval") == 1
    assert "&lt;b&gt;" in svg
    assert "<b>" not in svg
    assert "\x1b" not in svg
