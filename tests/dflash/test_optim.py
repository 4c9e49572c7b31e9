"""Muon's orthogonalisation against the plain iteration in float64; the moving average."""

import pytest
import torch
from torch import Tensor, nn

from dflash.optim import NEWTON_SCHULZ, lr_scale, num_blocks, orthogonalise, update_average
from dflash.parallel import clip_gradients


def plain(matrix: Tensor, steps: int) -> Tensor:
    """Newton-Schulz block by block along the short side, in float64 (Jordan 2024)."""
    a, b, c = NEWTON_SCHULZ
    short = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    done = []
    for block in short.double().chunk(num_blocks(len(short))):
        x = block / block.norm()
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        done.append(x)
    return torch.cat(done).T if short is not matrix else torch.cat(done)


@pytest.mark.parametrize("shape", [(192, 576), (384, 400), (700, 384), (96, 96)])
@pytest.mark.parametrize("smallest", [1.0, 1e-3, 1e-8])
def test_orthogonalise_is_the_plain_iteration(shape: tuple[int, int], smallest: float):
    """Also when singular values span eight decades, as those of a gradient do."""
    torch.manual_seed(0)
    u, s, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    matrix = (u * torch.logspace(0, 1, len(s), base=smallest)) @ v
    wanted = plain(matrix, 5)
    found = orthogonalise(matrix, 5, torch.float32).double()
    # Squares in float32 (1e-7) against factors of 3.44^5: a few 1e-5 of the whole.
    assert (found - wanted).norm() < 5e-4 * wanted.norm()


def test_orthogonalise_in_bfloat16_has_bfloat16_error():
    torch.manual_seed(0)
    matrix = torch.randn(192, 576)
    wanted = plain(matrix, 5)
    found = orthogonalise(matrix, 5, torch.bfloat16).double()
    assert (found - wanted).norm() < 3e-2 * wanted.norm()


def test_blocks_are_equal_parts_of_at_most_192_rows():
    assert [num_blocks(n) for n in (576, 192, 193, 384)] == [3, 1, 1, 2]


def weights(values) -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.as_tensor(values))])


def test_average_example():
    average = weights([0.0])
    update_average(average, weights([1.0]), decay=0.99, step=1)
    assert next(average.parameters()).item() == pytest.approx(9 / 11)


def test_average_of_a_long_run_is_the_plain_exponential_one():
    torch.manual_seed(0)
    walk, average, expected = (
        torch.randn(4000, 3).cumsum(0),
        weights(torch.zeros(3)),
        torch.zeros(3),
    )
    for step, values in enumerate(walk, start=1):
        update_average(average, weights(values), decay=0.98, step=step)
        expected = 0.98 * expected + 0.02 * values
    [found] = average.parameters()
    torch.testing.assert_close(found.data, expected, rtol=1e-4, atol=1e-4)


def test_frozen_weights_are_left_alone():
    average, frozen = weights([-0.0]), weights([5.0]).requires_grad_(False)
    update_average(average, frozen, decay=0.9, step=1)
    assert next(average.parameters()).item() == 0.0


def test_the_schedule_rises_linearly_and_falls_as_a_cosine_to_zero():
    scales = [lr_scale(step, 100, 0.04) for step in range(101)]
    assert scales[:4] == [0.25, 0.5, 0.75, 1.0]
    assert scales[52] == pytest.approx(0.5), "half of the 96 steps behind the warm-up"
    assert scales[100] == 0
    assert scales[3:] == sorted(scales[3:], reverse=True)
    assert lr_scale(0, 5, 0.0) == 1.0


def test_gradients_are_clipped_together_and_zero_is_no_limit():
    params = [torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)]
    for limit, norm in ((1.0, 1.0), (10.0, 7.0), (0.0, 7.0)):
        params[0].grad, params[1].grad = torch.tensor([6.0, 2.0]), torch.tensor([3.0])
        assert clip_gradients(params, limit) == pytest.approx(7.0)
        left = torch.cat([p.grad for p in params if p.grad is not None])
        assert left.norm().item() == pytest.approx(norm, rel=1e-4)
