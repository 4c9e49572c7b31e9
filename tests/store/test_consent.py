"""A single refusal of consent wins, in every copy and every part of a record."""

import pytest

from store.consent import consents


@pytest.mark.parametrize(
    "said",
    [(), (None,), (True,), ("true",), (" YES ",), ("1",), (1,), ("true, yes",), (None, "true")],
)
def test_nothing_said_or_clear_yeses_are_consent(said):
    assert consents(*said)


@pytest.mark.parametrize(
    "said",
    [
        (False,),
        ("off",),
        ("",),
        (0,),
        ("false, false",),
        ("true,",),
        ("true", "false"),
        ("true, no",),
        ({},),
        ("ture",),
    ],
)
def test_whatever_is_not_a_clear_yes_is_a_no(said):
    assert not consents(*said)
