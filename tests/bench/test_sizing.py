"""The sizing table: its arithmetic by hand, and the page that quotes it."""

from pathlib import Path

import pytest

from bench import sizing

PAGE = Path(__file__).parents[2] / "docs/explanation/sizing.md"


def test_the_page_has_the_tables_and_assumptions_of_the_program():
    page = PAGE.read_text()
    assert sizing.tables() in page
    for name, value in sizing.ASSUMED.items():
        assert f"| {name} | {value:,g} |" in page


def test_an_8b_target_on_eight_gpus():
    """A billion tokens of 5 taps of 4,096: 40,960 bytes each, written by one node."""
    size = sizing.SIZES[0]
    assert size.token_bytes == 40_960
    found = sizing.plan(size, 8)
    assert found["stored_bf16"] == pytest.approx(0.686 * 4.096e13)
    writing = 0.686 * 4.096e13 / 5e9 / 3600  # prefill is faster: 5,180 s
    assert found["harvest"] == pytest.approx(writing)
    assert found["cached"] > found["harvest"]


def test_a_cache_pays_for_a_dense_target_and_more_gpus_are_faster():
    for size in sizing.SIZES:
        hours = [sizing.plan(size, gpus) for gpus in sizing.GPUS]
        for kind in ("cached", "recomputed", "streamed"):
            assert hours[0][kind] > hours[1][kind] > hours[2][kind]
    dense = sizing.plan(sizing.SIZES[3], 64)
    assert dense["cached"] < dense["recomputed"] <= dense["streamed"]
