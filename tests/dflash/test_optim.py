"""The moving average of weights."""

import pytest
import torch

from dflash.optim import update_average


def test_average_example():
    average, weights = {"w": torch.tensor([0.0])}, {"w": torch.tensor([1.0])}
    update_average(average, weights, decay=0.99, step=1)
    assert average["w"].item() == pytest.approx(9 / 11)


def test_average_of_a_long_run_is_the_plain_exponential_one():
    torch.manual_seed(0)
    walk, average, expected = torch.randn(4000, 3).cumsum(0), {"w": torch.zeros(3)}, torch.zeros(3)
    for step, weights in enumerate(walk, start=1):
        update_average(average, {"w": weights}, decay=0.98, step=step)
        expected = 0.98 * expected + 0.02 * weights
    torch.testing.assert_close(average["w"], expected, rtol=1e-4, atol=1e-4)
