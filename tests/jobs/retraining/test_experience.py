"""What a window gained: predicted beside served, and why one did not pay."""

import pytest

from jobs.base.config import load
from jobs.dataset.queries import ask, find_question
from jobs.retraining.experience import keep_served_gain
from store import windows
from store.lease import take
from store.windows import Window, Writer
from tests.helpers.retraining import NOON
from tests.helpers.tables import add_rows


@pytest.fixture
def cfg(tmp_path):
    return load(None, [f"work={tmp_path}"])


@pytest.fixture
def writer(cfg):
    return Writer(cfg.table("windows"), take(cfg.place("leases", "retrain")))


def window(number, state="promoted", reason="", drifted=(), **evaluated) -> Window:
    """A window whose drafter is d<number>, after d<number - 1>."""
    found = Window(number)
    shared = dict.fromkeys(("from_version", "to_version", "captured_from", "captured_to"))
    numbers = {"tokens": {"a": 700, "b": 300}, "drifted": list(drifted)}
    found.put("window", state=state, reason=reason, target_id="t", started_at=NOON, **shared)
    found.put("window", numbers=numbers)
    measured = {"drafter": f"d{number}", "baseline": f"d{number - 1}" if number > 1 else None}
    measured |= {"baseline_tau": 2.0, "gain": 0.2, "gain_low": 0.1, "gain_high": 0.3}
    found.put("evaluate", state="done", numbers=measured | evaluated)
    return found


def served(cfg, drafter, domain, rounds, count=1, k=3):
    shared = {"origin": "served", "log": "x", "domain": domain, "accepted": rounds}
    shared |= {"drafter_version": drafter, "drafted": [k] * len(rounds), "finished_at": NOON}
    add_rows(cfg, "acceptance", [shared | {"request_id": f"r{i}"} for i in range(count)])


def question(cfg):
    rows = ask(cfg, find_question("gain_of_windows").read_text()).to_pylist()
    return {row["window"]: row for row in rows}


def test_predicted_and_served_are_shares_of_the_drafter_before(cfg, writer):
    writer.write(window(1, baseline_tau=None, gain=1.0, gain_low=0.8, gain_high=1.2))
    writer.write(window(2))
    served(cfg, "d1", "a", [1, 1])
    served(cfg, "d2", "a", [2, 1])
    found = question(cfg)
    assert found[1]["predicted_gain"] == 1.0  # over plain decoding
    assert found[1]["served_gain"] == 1.0
    assert found[2]["predicted_gain"] == pytest.approx(0.1)
    assert (found[2]["predicted_low"], found[2]["predicted_high"]) == pytest.approx((0.05, 0.15))
    assert found[2]["served_gain"] == pytest.approx(2.5 / 2 - 1)
    assert found[2]["new_answer_tokens"] == 1000
    assert found[2]["why"] == "it paid"


def test_neither_another_mix_nor_another_k_is_a_gain(cfg, writer):
    writer.write(window(2))
    served(cfg, "d1", "a", [3, 3], 10)
    served(cfg, "d1", "b", [0, 1], 90)
    served(cfg, "d2", "a", [3, 3], 90)
    served(cfg, "d2", "b", [0, 1], 10)
    assert question(cfg)[2]["served_gain"] == pytest.approx(0.0)
    served(cfg, "d2", "a", [2, 2], 500, k=2)  # the load is higher: fewer drafts, as good
    assert question(cfg)[2]["served_gain"] == pytest.approx(0.0)
    served(cfg, "d2", "new", [0, 0], 500)  # what the other never served is not compared
    assert question(cfg)[2]["served_gain"] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"state": "skipped", "reason": "too few tokens: 3"}, "too few tokens: 3"),
        ({"state": "refused", "reason": "gate: tau"}, "gate: tau"),
        ({}, "it did not pay: no domain had drifted when it began"),
        ({"drifted": ["drift of a"]}, "it did not pay, though a gain was predicted: compare"),
        (
            {"drifted": ["drift of a"], "gain_low": -0.1},
            "it did not pay: the predicted gain was not established",
        ),
    ],
)
def test_a_window_that_did_not_pay_says_why(cfg, writer, values, why):
    writer.write(window(2, **values))
    served(cfg, "d1", "a", [2, 2])
    served(cfg, "d2", "a", [1, 1])
    assert question(cfg)[2]["why"].startswith(why)


def test_the_latest_promoted_window_keeps_what_production_says(cfg, writer):
    known = [window(2), window(3, state="held", reason="gate: few")]
    for one in known:
        writer.write(one)
    served(cfg, "d1", "a", [1, 1])
    served(cfg, "d2", "a", [2, 1])
    keep_served_gain(cfg, windows.read(cfg.table("windows")), writer)
    two, three = windows.read(cfg.table("windows"))
    kept = two.whole["numbers"]["served"]
    assert kept["served_gain"] == pytest.approx(0.25)
    assert (kept["requests_before"], kept["requests_after"], kept["why"]) == (1, 1, "it paid")
    assert "served" not in three.whole["numbers"]
    version = cfg.table("windows").version()
    keep_served_gain(cfg, windows.read(cfg.table("windows")), writer)
    assert cfg.table("windows").version() == version
