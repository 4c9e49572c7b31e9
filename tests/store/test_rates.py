"""When a number of bad records is significant evidence of a rate above the limit."""

import pytest

from store.rates import exceeds


@pytest.mark.parametrize(
    ("bad", "total", "limit", "stops"),
    [(1, 7, 0.05, False), (2, 7, 0.05, False), (3, 7, 0.05, True), (400, 2000, 0.05, True)]
    + [(110, 2000, 0.05, False), (0, 9, 0.0, False), (1, 9, 0.0, True), (9, 9, 1.0, False)]
    + [(60_000, 1_000_000, 0.05, True), (50_100, 1_000_000, 0.05, False)],
)
def test_a_rate_is_established_before_it_stops_anything(bad, total, limit, stops):
    assert exceeds(bad, total, limit) is stops
