"""Every trigger of the policy on its own, and what a domain new in a window changes."""

from dataclasses import replace
from datetime import timedelta

import pytest

from dflash.identity import target_id
from jobs import promote
from jobs.retraining.drift import Found, Mixed
from jobs.retraining.foreign_champion import foreign_champion, mark
from jobs.retraining.new_samples import New
from jobs.retraining.policy import Schedule, Tokens, read_policy
from jobs.retraining.recipe import adapted, seconds_per_step
from jobs.retraining.triggers import drift, look, mixed, schedule, tokens
from store.windows import Window
from tests.helpers.promotion import (
    SHAPE,
    actions,
    evaluate,
    make_drafter,
    make_registry,
    make_target,
    promoted,
)
from tests.helpers.retraining import NOON, add_traffic

LIMITS = read_policy("").drift


def new(**counts: int) -> New:
    return New(None, 1, dict.fromkeys(counts, 1), counts, {}, None, None)


def window(state: str = "promoted", **values) -> Window:
    found = Window(1)
    found.put("window", state=state, started_at=NOON, **values)
    return found


@pytest.mark.parametrize(
    ("hours", "fires", "why"),
    [
        (23.9, False, "since window 1 began"),
        (24.1, True, "since window 1 began"),
        (-1000, True, "window 1 is dated in the future"),
    ],
)
def test_schedule(hours, fires, why):
    found = schedule(Schedule(hours=24.0), [window()], new(a=5), NOON + timedelta(hours=hours))
    assert (found.fires, found.why) == (fires, why)


def test_a_schedule_needs_something_new():
    late = NOON + timedelta(days=9)
    assert schedule(Schedule(hours=24.0), [], new(a=5), late).fires
    found = schedule(Schedule(hours=24.0), [window("skipped")], new(), late)
    assert (found.fires, found.why) == (False, "since window 1 began, but no sample is new")
    assert not schedule(Schedule(hours=0.0), [], new(a=5), late).fires


def test_tokens_of_each_domain():
    limits = Tokens(min=100, domains=["b=1000", "c=0"])
    found = tokens(limits, new(a=100, b=999, c=5000, d=99))
    assert [(t.name, t.limit, t.fires) for t in found] == [
        ("tokens of a", "100", True),
        ("tokens of b", "1,000", False),
        ("tokens of c", "never", False),
        ("tokens of d", "100", False),
    ]


def test_drift_and_mix_are_both_shown():
    found = [
        Found("a", 2000, True, -0.04, -0.06, -0.02),
        Found("b", 2000, False, 0.01, -0.01, 0.03),
        Found("c", 5, False),
    ]
    rows = drift(LIMITS, found)
    assert [(t.name, t.value, t.fires) for t in rows] == [
        ("drift of a", "-4.0%", True),
        ("drift of b", "+1.0%", False),
        ("drift of others", "1 domains, at most 5 requests", False),
    ]
    assert "it has fired and is not back above -2.5%" in rows[0].why
    [row] = mixed(Mixed(-0.2, 0.01, {"a": (0.9, 0.1), "b": (0.1, 0.9)}))
    assert (row.value, row.fires) == ("-20.0%", False)
    assert "a 90% -> 10%, b 10% -> 90%" in row.why
    assert "within them +1.0%" in row.why


def test_a_changed_target_is_seen_and_recorded_once(tmp_path, empty_database):
    cfg = make_registry(tmp_path, empty_database)
    policy = read_policy("")
    add_traffic(cfg, range(3))
    promoted(cfg, "one", 1)
    assert foreign_champion(cfg) is None
    assert not {t.name: t for t in look(cfg, policy)}["target"].fires
    before = target_id(cfg.target_path)
    (cfg.path("target") / "chat_template.jinja").write_text("{{ messages }}")
    found = {t.name: t for t in look(cfg, policy)}
    assert found["target"].fires
    assert found["target"].limit == before
    assert "champion 1 is for another target, tokenizer or template" in found["target"].why
    champion = foreign_champion(cfg)
    assert champion is not None
    for _ in range(2):
        assert before in mark(cfg, champion)
    assert actions(cfg) == [("promote", None, "1"), ("incompatible", "1", "1")]


def test_a_drafter_for_a_target_of_another_shape_takes_over(tmp_path, empty_database):
    """No replay can compare it with a champion that does not fit the target."""
    cfg = make_registry(tmp_path, empty_database)
    promoted(cfg, "one", 1)
    make_target(cfg, hidden_size=32)
    wide = replace(SHAPE, hidden_size=32)
    folder = make_drafter(cfg, "two", 2, wide)
    evaluate(cfg, folder, shape=wide)
    decided = promote.run(cfg.override("promote", drafter=str(folder)))
    assert (decided["decision"], decided["previous"]) == ("promoted", "1")


def test_the_domain_that_a_window_adapts_to():
    assert adapted({"a": 100}, {}) == ""  # the first window
    assert adapted({"a": 50, "b": 50}, {"a": 100}) == "b"
    assert adapted({"b": 100}, {"a": 75, "b": 25}) == "b"
    assert adapted({"a": 60, "b": 40}, {"a": 50, "b": 50}) == ""  # as before
    assert adapted({"a": 90, "b": 10}, {"a": 100}) == ""  # too little to be what it is about


def test_the_speed_of_the_last_training():
    one = window()
    one.put("train", numbers={"seconds": 30.0, "step": 60})
    assert seconds_per_step([one, window()]) == 0.5
    assert seconds_per_step([]) is None
