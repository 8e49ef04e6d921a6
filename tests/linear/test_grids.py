"""A convolution on one polyphase grid of each sample: its values and derivatives are those of the whole map, where it is kept."""

import pytest
import torch
import torch.nn.utils.parametrize
import torch.nn.utils.prune

import autosym
from autosym.bayes.likelihoods import Categorical
from autosym.curvature.kronecker import kfac
from autosym.linear.circular import circular_conv, transposed
from autosym.linear.grids import Grid, _adjoint, _by_place, conv_on_grid, largest_grid, on_grid
from autosym.nn import nets
from autosym.nn.layers import Affine, Relaxed, conv

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


@pytest.mark.parametrize("form", [transposed, _by_place])
@pytest.mark.parametrize(("size", "kernel", "stride"), CASES)
def test_the_forms_for_a_gpu_are_the_same(size, kernel, stride, form):
    _, filters, _ = drawn(size, kernel, stride)
    g = torch.randn(5, 3, *(n // stride for n in size), dtype=torch.float64)
    torch.testing.assert_close(_adjoint(g, filters, stride), form(g, filters, stride))


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


def test_half_precision_does_not_overflow():
    torch.manual_seed(0)
    y = 40 * torch.randn(4, 64, 4, 4)
    y[:, :, 1::2, ::2] *= 1.5
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(largest_grid(y.to(dtype), 2), largest_grid(y, 2))


def strided(seed=0):
    """A layer of two convolutions, downsampled, whose biases decide on the grid as much as its filters do."""
    torch.manual_seed(seed)
    layer = Relaxed({name: conv((2, 4, 4), (3, 2, 2)) for name in ("one", "other")}, {}, stride=2).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=2.0)
    return layer, torch.randn(40, 2, 4, 4, dtype=torch.float64)


def test_a_layer_computes_the_same_with_and_without_a_graph():
    layer, x = strided()
    with torch.no_grad():
        expected = layer(x)
    assert torch.equal(layer(x), expected)


def prune(layer):
    torch.nn.utils.prune.l1_unstructured(layer["one"].linear, "weight", 0.5)
    layer["one"].linear.weight_orig.data *= 3  # by an optimiser, say


def double(layer):
    layer["one"].linear.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))


def reparametrise(layer):
    class Twice(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    torch.nn.utils.parametrize.register_parametrization(layer["one"].linear, "weight", Twice())


@pytest.mark.parametrize("change", [prune, double, reparametrise])
def test_hooks_and_parametrisations_of_others_are_kept(change):
    layer, x = strided()
    before = layer(x)
    change(layer)
    with torch.no_grad():
        expected = layer(x)
    assert not torch.allclose(before, expected)
    torch.testing.assert_close(layer(x), expected)


def test_hooks_of_others_see_the_whole_map():
    layer, x = strided()
    seen = []
    layer["one"].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    layer(x)
    assert seen == [(40, 3, 4, 4)]


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
