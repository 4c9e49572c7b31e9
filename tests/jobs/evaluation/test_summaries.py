"""The parts of a comparison that the gate judges."""

import pytest

from jobs.evaluation.intervals import Resamples
from jobs.evaluation.summaries import judged_domains


def comparison(sizes):
    """Requests of these domains, {name: conversations}, ten rounds each; ours is better in "a"."""
    rows, ours, theirs = [], [], []
    for name, size in sizes.items():
        for i in range(size):
            rows.append({"domain": name, "conversation_id": f"{name}{i}"})
            theirs.append([i % 3, 1, 0, 2, 1] * 2)
            ours.append([(i + (name == "a")) % 3, 1, 1, 2, 1] * 2)
    draws = Resamples([row["conversation_id"] for row in rows], 200)
    return judged_domains(draws, rows, ours, theirs, 3)


def test_domains_are_judged_alone_and_rare_ones_together():
    found = comparison({"a": 50, "b": 48} | {f"rare{i}": 1 for i in range(4)})
    assert [part["name"] for part in found] == ["a", "b", ""]
    assert {part["tests"] for part in found} == {3}
    assert found[2]["members"] == ["rare0", "rare1", "rare2", "rare3"]
    assert sum(part["share"] for part in found) == pytest.approx(1)
    assert [part["conversations"] for part in found] == [50, 48, 4]
    assert found[2]["ci"] is found[2]["ci_corrected"] is found[2]["detectable"] is None
    for part in found[:2]:
        (low, high), (lower, higher) = part["ci"], part["ci_corrected"]
        assert lower < low < part["delta"] < high < higher


def test_a_client_that_invents_domains_does_not_weaken_the_others():
    """With one test for each label, no interval could exclude anything."""
    found = comparison({"a": 400} | {f"invented{i}": 1 for i in range(100)})
    assert [part["tests"] for part in found] == [2, 2]


def test_one_domain_is_not_corrected():
    (part,) = comparison({"a": 30})
    assert part["ci"] == part["ci_corrected"]
    assert (part["share"], part["members"]) == (1.0, ["a"])
