"""Roll-outs over fake replicas: who advances, who is held, who goes back, and what a fault does."""

import pytest

from tests.helpers.promotion import aliases
from tests.helpers.rollouts import world

GOOD, EQUAL, DEAD = {"": 0.6}, {"": 0.6}, {"": 0.0}


@pytest.fixture
def make(tmp_path, empty_database):
    return lambda *chances, **more: world(tmp_path, empty_database, chances, **more)


def test_a_good_drafter_advances_over_three_replicas(make):
    with make(GOOD, EQUAL, replicas=3) as one:
        found = one.run()
        assert found["decision"] == "advanced", found
        assert found["ok"]
        assert one.loaded() == ["2", "2", "2"]
        assert one.actions() == [
            ("promote", "1"),
            ("promote", "2"),
            ("canary", "2"),
            ("advance", "2"),
        ]
        # The others were left alone until the canary had proved itself.
        assert [fake.swaps for fake in one.fakes] == [1, 1, 1]
        assert one.run()["decision"] == "unchanged"
        assert (one.cfg.path("rollouts") / f"{found['rollout']}.svg").read_text().startswith("<svg")


def test_a_dead_drafter_is_stopped_at_the_canary_and_the_registry_goes_back(make):
    with make(GOOD, DEAD, replicas=3) as one:
        found = one.run()
        assert found["decision"] == "rolled back", found
        assert one.loaded() == ["1", "1", "1"]
        assert [fake.swaps for fake in one.fakes] == [2, 0, 0]
        assert aliases(one.cfg)["champion"] == "1"
        assert one.actions()[2:] == [("canary", "2"), ("rollback", "2"), ("rollback", "1")]
        assert one.run()["decision"] == "unchanged"  # it does not try again
