"""A convolution on one polyphase grid of each sample: its values and derivatives are those of the whole map, where it is kept."""

import pytest
import torch

import autosym
from autosym.bayes.likelihoods import Categorical
from autosym.curvature.kronecker import kfac
from autosym.linear.circular import circular_conv, transposed
from autosym.linear.grids import Grid, _adjoint, conv_on_grid, largest_grid, on_grid
from autosym.nn import nets
from autosym.nn.layers import Affine

CASES = [
    ((8, 8), (3, 3), 2),
    ((2, 2), (3, 3), 2),
    ((2, 4), (3, 3), 2),
    ((6, 9), (5, 3), 3),
    ((4, 4), (1, 1), 2),
    ((4, 8), (7, 5), 4),
]


def drawn(size, kernel, stride):
    torch.manual_seed(0)
    x = torch.randn(5, 2, *size, dtype=torch.float64, requires_grad=True)
    filters = torch.randn(3, 2, *kernel, dtype=torch.float64, requires_grad=True)
    return x, filters, torch.randint(stride**2, (5,))


def kept(x, filters, stride, chosen):
    """The fast form."""
    with torch.no_grad():
        full = circular_conv(x, filters)
    return conv_on_grid(x, filters, Grid(stride, chosen, full))


@pytest.mark.parametrize(("size", "kernel", "stride"), CASES)
def test_values_and_both_derivatives(size, kernel, stride):
    x, filters, chosen = drawn(size, kernel, stride)
    y, whole = kept(x, filters, stride, chosen), on_grid(circular_conv(x, filters), stride, chosen)
    assert torch.equal(y, whole)
    g = torch.randn_like(y)
    first = [torch.autograd.grad(one, (x, filters), g, create_graph=True) for one in (y, whole)]
    torch.testing.assert_close(*first)
    second = [torch.autograd.grad(sum(t.square().sum() for t in one), (x, filters)) for one in first]
    torch.testing.assert_close(*second)


@pytest.mark.parametrize(("size", "kernel", "stride"), CASES)
def test_the_form_for_a_gpu_is_the_same(size, kernel, stride):
    _, filters, _ = drawn(size, kernel, stride)
    g = torch.randn(5, 3, *(n // stride for n in size), dtype=torch.float64)
    torch.testing.assert_close(_adjoint(g, filters, stride), transposed(g, filters, stride))


def test_sample_by_sample_with_vmap():
    x, filters, chosen = drawn((4, 4), (3, 3), 2)

    def slope(x, chosen):
        return torch.func.grad(lambda w: kept(x[None], w, 2, chosen[None]).square().sum())(filters.detach())

    each = torch.func.vmap(slope)(x.detach(), chosen)
    total = torch.func.grad(lambda w: kept(x.detach(), w, 2, chosen).square().sum())(filters.detach())
    torch.testing.assert_close(each.sum(0), total)


def test_spread_is_the_adjoint_of_what_is_kept():
    torch.manual_seed(0)
    y, chosen = torch.randn(5, 3, 4, 6, dtype=torch.float64), torch.randint(4, (5,))
    grid = Grid(2, chosen, y).without_map()
    g = torch.randn(5, *grid.shape, dtype=torch.float64)
    torch.testing.assert_close((on_grid(y, 2, chosen) * g).sum(), (y * grid.spread(g)).sum())
    assert torch.equal(on_grid(grid.spread(g), 2, chosen), g)


def test_the_grid_with_the_largest_norm():
    torch.manual_seed(0)
    y = torch.randn(6, 3, 4, 6)
    norms = torch.stack([y[..., i::2, j::2].flatten(1).norm(dim=1) for i in range(2) for j in range(2)], 1)
    assert torch.equal(largest_grid(y, 2), norms.argmax(1))


@pytest.mark.parametrize("options", [{}, {"sampled": True}, {"expand_bias": True}], ids=str)
@pytest.mark.parametrize("copies", [0, 3])
def test_curvature_is_that_of_the_whole_map(copies, options, monkeypatch):
    """Copies of a sample (``symmetrise``) keep different grids, and their cotangents are added up."""
    torch.manual_seed(0)
    net = nets.build("f-fc+conv", (1, 8, 8), 3, 2, (1, 2, 2), (2, 2, 2), hidden=2).double()
    model = autosym.symmetrise(net, "rotation", copies) if copies else net
    data = torch.randn(6, 1, 8, 8, dtype=torch.float64), torch.arange(6) % 3
    found = kfac(model, data, Categorical(), **options)
    monkeypatch.setattr(Affine, "thins", False)
    whole = kfac(model, data, Categorical(), **options)
    for name, factors in whole.factors.items():
        torch.testing.assert_close(found.factors[name].A, factors.A)
        torch.testing.assert_close(found.factors[name].G, factors.G)
