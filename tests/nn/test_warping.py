"""Images moved by affine maps: matrices against grid_sample, units, and the exponential against torch's."""

import math

import pytest
import torch
import torch.nn.functional as F

from autosym.nn import warping


@pytest.mark.parametrize("padding", ["zeros", "border"])
@pytest.mark.parametrize("shape", [(5, 5), (4, 6)], ids=str)
def test_matrices_of_resampling_are_those_of_grid_sample_and_so_are_their_slopes(padding, shape):
    torch.manual_seed(0)
    inverse = (torch.eye(3).double() + 0.3 * torch.randn(3, 3, 3).double()).requires_grad_()
    x, weight = torch.randn(3, 1, *shape).double(), torch.randn(3, shape[0] * shape[1]).double()
    R = warping.resampling(inverse, *shape, padding)
    by_matrix = torch.einsum("nq,nqp->np", x.flatten(1), R)
    by_grid = warping.warped(x, inverse, padding).flatten(1)
    torch.testing.assert_close(by_matrix, by_grid, rtol=1e-10, atol=1e-10)
    slopes = [torch.autograd.grad((out * weight).sum(), inverse)[0] for out in (by_matrix, by_grid)]
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(6, 6), (4, 7)], ids=str)
def test_units_matter_to_shifts_only(shape):
    x = torch.randn(2, 3, *shape).double()
    turn = torch.tensor([[[0.6, -0.8, 0.0], [0.8, 0.6, 0.0]]]).double().expand(2, 2, 3)
    torch.testing.assert_close(warping.warped(x, turn), warping.warped(x, turn, unit=1.0))
    shift = torch.tensor([[[1.0, 0, 1], [0, 1, -2]]]).double().expand(2, 2, 3)  # to the left by a pixel, down by two
    expected = F.pad(x, (0, 1, 2, 0))[..., : shape[0], 1 : shape[1] + 1]
    torch.testing.assert_close(warping.warped(x, shift, unit=1.0), expected)
    by_sides = shift.clone()
    by_sides[:, :, 2] /= max(shape) / 2
    torch.testing.assert_close(warping.warped(x, by_sides), expected)


@pytest.mark.parametrize("norm", [0.0, 0.1, math.pi, 4 * math.pi])
def test_the_exponential_is_torchs(norm):
    M = torch.randn(20, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    M = norm * M / M.flatten(1).norm(dim=1)[:, None, None]
    expected = torch.matrix_exp(M)
    assert float((warping.exponential(M) - expected).norm() / expected.norm()) < 1e-12
