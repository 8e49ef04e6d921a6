"""Products with the Gauss-Newton matrix, against the dense one by torch.func."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import oracles
from autosym.bayes import likelihoods
from autosym.curvature.gauss_newton import GaussNewton
from factories import LIKELIHOODS
from models import EXACT, convnet, mlp, owned, randomised, small

every = pytest.mark.parametrize("case", LIKELIHOODS)
NETS = ("conv", "f-fc", "fc", "s-fc", "s-conv", "gconv:c4", "f-fc+conv")


def problem(case, model, shape, samples=7):
    x = torch.randn(samples, *shape, dtype=torch.float64)
    return model, x, case.draw(model(x).detach())


def dense(model, x, y, case):
    return oracles.whole_ggn(model, [name for _, name in owned(model)], x, y, case.log_prob)


def assert_products(case, model, shape):
    model, x, y = problem(case, model, shape)
    likelihood = case.make()
    H, exact = GaussNewton(model, (x, y), likelihood, batch_size=3), dense(model, x, y, case)
    v = torch.randn(2, len(exact), dtype=torch.float64)
    assert_close(float(likelihood.scale().detach()) * H(v), v @ exact, **EXACT)
    assert H.products == 2


@every
@pytest.mark.parametrize("name", NETS)
def test_products_of_networks(case, name):
    torch.manual_seed(1)
    assert_products(case, randomised(small(name, case.outputs)), (2, 4, 4))


@every
def test_products_of_layers_of_torch(case):
    torch.manual_seed(1)
    assert_products(case, mlp(5, 4, case.outputs), (5,))


def test_products_of_convolutions_of_torch():
    torch.manual_seed(1)
    categorical = LIKELIHOODS[0].values[0]
    assert_products(categorical, convnet(), (2, 6, 5))


@every
def test_the_slope_of_the_linearised_network(case):
    torch.manual_seed(2)
    model, x, y = problem(case, mlp(5, 4, case.outputs), (5,))
    H = GaussNewton(model, (x, y), case.make(), batch_size=3)
    scale = float(H.likelihood.scale().detach())
    parameters = dict(model.named_parameters())
    for size in (0.0, 0.3):
        offset = size * torch.randn(sum(H.sizes), dtype=torch.float64)
        H.offset = offset if size else None
        d = {n: part.view_as(p) for (n, p), part in zip(parameters.items(), offset.split(H.sizes), strict=True)}
        detached = {n: p.detach() for n, p in parameters.items()}
        f, moved = jvp(lambda p: functional_call(model, p, (x,)), (detached,), (d,))
        f = (f + moved).requires_grad_()
        (g,) = torch.autograd.grad(-case.log_prob(f, y), f)
        slopes = torch.autograd.grad(model(x), list(model.parameters()), g)
        statistic, found = H.slope()
        assert_close(scale * found, torch.cat([s.flatten() for s in slopes]), **EXACT)
        assert_close(statistic, H.likelihood.statistic(f.detach(), y).double(), **EXACT)


def test_frozen_and_unused_weights():
    model = mlp(4, 3, 2)
    model[0].weight.requires_grad_(False)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(2, (6,))
    H = GaussNewton(model, (x, y), likelihoods.of("categorical"))
    assert sum(H.sizes) == 3 + 8
    assert not any(p.grad is not None for p in model.parameters())
    assert H(torch.ones(1, 11, dtype=torch.float64)).shape == (1, 11)


def test_data_that_can_be_read_once_are_refused():
    model, x, y = mlp(4, 3, 2), torch.randn(6, 4, dtype=torch.float64), torch.randint(2, (6,))
    H = GaussNewton(model, list(DataLoader(TensorDataset(x, y), 2)), likelihoods.of("categorical"))
    v = torch.ones(1, sum(H.sizes), dtype=torch.float64)
    H(v)
    H.data = H.data[:2]
    with pytest.raises(ValueError, match="showed 6 samples, and then 4"):
        H(v)


def test_dropout_is_refused():
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout()).double()
    with pytest.raises(ValueError, match="train mode"):
        GaussNewton(model, (torch.zeros(2, 4), torch.zeros(2).long()), likelihoods.of("categorical"))


class Counted(torch.autograd.Function):
    """An operation whose derivative cannot be taken for several vectors at once, as it reads a number."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return g * (2.0 if float(g.detach().sum()) < 1e9 else 0.0)


class Reads(nn.Module):
    def forward(self, x):
        return Counted.apply(x)


@pytest.mark.parametrize("odd", [False, True])
def test_products_in_blocks_are_those_of_each_vector(odd):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 4), nn.Tanh(), *([Reads()] if odd else []), nn.Linear(4, 3)]
    model = nn.Sequential(*layers).double()
    data = torch.randn(7, 5, dtype=torch.float64), torch.arange(7) % 3
    H = GaussNewton(model, data, likelihoods.Categorical(), batch_size=3)
    vectors = torch.randn(11, sum(H.sizes), dtype=torch.float64)
    together = H(vectors)
    torch.testing.assert_close(together, torch.cat([H(v[None]) for v in vectors]))
    assert H.products == 22
    moved, back = H.along(vectors)[1], H.back(torch.ones(9, 7, 3, dtype=torch.float64))
    torch.testing.assert_close(moved[10], H.along(vectors[10:])[1][0])
    torch.testing.assert_close(back, back[:1].expand_as(back))
