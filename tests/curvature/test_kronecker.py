"""Curvature equals the exact Gauss-Newton matrix where it should, an explicit loop elsewhere, and curvlinops."""

import pytest
import torch
from curvlinops import KFACLinearOperator
from torch import nn
from torch.func import hessian, jacrev, vmap
from torch.testing import assert_close

import oracles
from autosym.linear.conv import Conv
from autosym.linear.dense import Bias, Dense
from autosym.linear.factored import FactoredIn, FactoredOut
from autosym.nn import layers, nets
from models import EXACT, KINDS, convnet, curvature, draw, exact_blocks, mlp, owned, randomised


def linear_nets():
    yield "linear", nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), (5,)
    yield "dense", nn.Sequential(Dense((5,), (4,)), Dense((4,), (3,))), (5,)
    yield "affine", nn.Sequential(layers.fc((2, 3), (3, 2)), layers.fc((3, 2), (3,))), (2, 3)
    yield "factored", nn.Sequential(layers.Factored((2, 4, 6), (3, 2, 3)), layers.fc((3, 2, 3), (3,))), (2, 4, 6)


# ---- equality with the exact generalised Gauss-Newton matrix


@pytest.mark.parametrize("likelihood", KINDS)
@pytest.mark.parametrize("name", ["fc+conv", "f-fc+conv"])
def test_one_sample_is_exact_where_positions_are_not_shared(name, likelihood):
    model = randomised(nets.build(name, (2, 4, 4), 3, 2, channels=(1, 2), strides=(1, 2), hidden=2))
    x, y = draw(likelihood, 1, (2, 4, 4))
    found = curvature(model, (x, y), likelihood)
    checked = set()
    for path, parameter in owned(model):
        module = model.get_submodule(path)
        if not isinstance(module, Conv):
            exact = exact_blocks(model, parameter, x, y, likelihood, module.weight.shape[0])
            assert exact.abs().max() > 1e-8, "the test would be empty"
            assert_close(oracles.kron_blocks(found, path), exact, **EXACT)
            checked.add(type(module))
    assert checked == ({Dense, Bias} if name == "fc+conv" else {Dense, FactoredIn, FactoredOut, Bias})


@pytest.mark.parametrize(("name", "model", "shape"), [pytest.param(*case, id=case[0]) for case in linear_nets()])
def test_linear_networks_with_squared_loss_are_exact(name, model, shape):
    x, y = draw("gaussian", 7, shape)
    found = curvature(randomised(model), (x, y), "gaussian", batch_size=3)
    for path, parameter in owned(model):
        exact = exact_blocks(model, parameter, x, y, "gaussian", len(found.factors[path].A))
        assert_close(oracles.kron_blocks(found, path), exact, **EXACT)


@pytest.mark.parametrize("likelihood", KINDS)
@pytest.mark.parametrize("name", ["conv", "f-fc+conv"])
def test_bias_is_exact_everywhere(name, likelihood):
    model = randomised(nets.build(name, (2, 4, 4), 3, 2, channels=(1, 2), strides=(1, 2), hidden=2))
    x, y = draw(likelihood, 6, (2, 4, 4))
    found = curvature(model, (x, y), likelihood)
    biases = [(path, p) for path, p in owned(model) if isinstance(model.get_submodule(path), Bias)]
    assert len(biases) >= 4
    for path, parameter in biases:
        assert_close(oracles.kron_blocks(found, path)[0], oracles.block_ggn(model, parameter, x, y, likelihood), **EXACT)


def test_adopted_bias_of_a_convolution_is_exact_and_expand_is_not():
    model = convnet()
    x, y = draw("categorical", 6, (2, 6, 5))
    for name in ("0.bias", "2.bias", "5.bias"):
        exact = oracles.block_ggn(model, name, x, y, "categorical")
        assert_close(oracles.kron_blocks(curvature(model, (x, y)), name)[0], exact, **EXACT)
        expand = oracles.kron_blocks(curvature(model, (x, y), expand_bias=True), name)[0]
        assert ((expand - exact).norm() / exact.norm() > 0.1) == (name != "5.bias")


def test_adopted_bias_of_a_linear_layer_on_sequences_is_exact():
    model = randomised(nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Linear(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)))
    x, y = draw("categorical", 5, (6,))
    exact = oracles.block_ggn(model, "1.bias", x, y, "categorical")
    assert_close(oracles.kron_blocks(curvature(model, (x, y)), "1.bias")[0], exact, **EXACT)


def test_exactness_negative_control_several_samples_of_a_nonlinear_network():
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 7)
    exact = oracles.block_ggn(model, "0.weight", x, y, "categorical")
    block = oracles.kron_blocks(curvature(model, (x, y)), "0.weight")[0]
    assert (block - exact).norm() / exact.norm() > 0.01
    assert 0.5 < block.trace() / exact.trace() < 2


def test_torchs_layers_are_read_as_paths():
    """nn.Conv2d and nn.Linear give the factors of Conv, Dense and Bias with the same weights."""
    model = convnet("circular", groups=2, stride=2)
    ours = nn.Sequential(
        layers.Affine(Conv(2, 4, 3, 2, groups=2), Bias((4, 1, 1), (4, 3, 3))),
        nn.ReLU(),
        layers.Affine(Conv(4, 2, (3, 1), padding=(0, 0, 0, 0)), Bias((2, 1, 1), (2, 1, 3))),
        nn.ReLU(),
        nn.Flatten(),
        layers.Affine(Dense((6,), (3,)), Bias((3,))),
    ).double()
    for theirs, own in zip(model.parameters(), ours.parameters(), strict=True):
        own.data = theirs.detach().reshape(own.shape)
    x, y = draw("categorical", 4, (2, 6, 5))
    assert_close(model(x), ours(x), **EXACT)
    for expand_bias in (False, True):
        a, b = (curvature(net, (x, y), expand_bias=expand_bias).factors.values() for net in (model, ours))
        for f, g in zip(a, b, strict=True):
            assert_close((f.A, f.G), (g.A, g.G), **EXACT)


# ---- convolutions


CONVS = {
    "circular": lambda: Conv(2, 3),
    "circular 5x3": lambda: Conv(2, 3, (5, 3)),
    "circular stride": lambda: Conv(2, 3, stride=2),
    "circular groups": lambda: Conv(2, 4, groups=2),
    "circular dilation": lambda: Conv(2, 3, dilation=2),
    "zeros": lambda: Conv(2, 3, padding_mode="zeros"),
    "zeros stride": lambda: Conv(2, 3, stride=(2, 1), padding_mode="zeros"),
    "zeros groups": lambda: Conv(2, 4, groups=2, padding_mode="zeros"),
    "zeros even": lambda: Conv(2, 3, 2, padding=(1, 0, 0, 1), padding_mode="zeros"),
}


@pytest.mark.parametrize("likelihood", KINDS)
@pytest.mark.parametrize("name", CONVS)
def test_convolutions_equal_the_explicit_loop(name, likelihood):
    path = CONVS[name]()
    after = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))
    x, y = draw(likelihood, 3, (2, 6, 5))
    after(path(x.float()))
    model = randomised(nn.Sequential(path, after))
    f, h = model(x).detach(), path(x).detach()
    values, vectors = torch.linalg.eigh(vmap(hessian(oracles.negative_log_likelihood(likelihood)))(f, y))
    root = vectors * values.clamp_min(0).sqrt()[:, None, :]
    cotangents = torch.einsum("ndc,nd...->nc...", root, vmap(jacrev(lambda t: after(t[None])[0]))(h))
    A, G = oracles.expand_factors(path, x, cotangents)
    found = curvature(model, (x, y), likelihood, batch_size=2).factors["0"]
    assert_close(found.A, A, **EXACT)
    assert_close(found.G, G, **EXACT)


@pytest.mark.parametrize("padding_mode", ["circular", "zeros"])
@pytest.mark.parametrize("likelihood", KINDS)
def test_convolutions_stay_near_the_exact_matrix(likelihood, padding_mode):
    """As ratios to the exact ones at torch's own initial weights: every trace within 0.5 to 1.5 and log det(I + .) within
    0.65 to 1.35; their means over six networks within 0.8 to 1.2."""
    ratios = []
    for seed in range(6):
        torch.manual_seed(seed)
        model = convnet(padding_mode)
        for module in (model[0], model[2], model[5]):
            module.reset_parameters()
        x, y = draw(likelihood, 30, (2, 6, 5))
        found = curvature(model, (x, y), likelihood)
        for name in ("0.weight", "2.weight"):
            exact = oracles.block_ggn(model, name, x, y, likelihood)
            block = oracles.kron_blocks(found, name)[0]
            eye = torch.eye(len(exact), dtype=torch.float64)
            log_det = torch.logdet(eye + block) / torch.logdet(eye + exact)
            ratios.append(torch.stack([block.trace() / exact.trace(), log_det]))
    traces, log_dets = torch.stack(ratios).T
    assert traces.min() > 0.5
    assert traces.max() < 1.5
    assert log_dets.min() > 0.65
    assert log_dets.max() < 1.35
    assert 0.8 < traces.mean() < 1.2
    assert 0.8 < log_dets.mean() < 1.2


# ---- a published library


def diagonal_blocks(operator, sizes):
    dense = operator @ torch.eye(operator.shape[1], dtype=torch.float64)
    return [rows.split(sizes, 1)[i] for i, rows in enumerate(dense.split(sizes, 0))]


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        pytest.param(lambda: mlp(5, 6, 4, 3), (5,), id="mlp"),
        pytest.param(lambda: convnet(), (2, 6, 5), id="convnet"),
        pytest.param(lambda: convnet(stride=2), (2, 6, 5), id="stride"),
    ],
)
def test_kronecker_products_equal_curvlinops(make, shape, likelihood):
    model = make()
    x, y = draw(likelihood, 8, shape)
    loss = nn.CrossEntropyLoss(reduction="sum") if likelihood == "categorical" else nn.MSELoss(reduction="sum")
    doubled = 1 if likelihood == "categorical" else 2  # the squared error is twice the negative log-likelihood
    parameters = list(model.parameters())
    options = {"fisher_type": "type-2", "separate_weight_and_bias": True}
    operator = KFACLinearOperator(model, loss, parameters, [(x, y)], **options)
    theirs = diagonal_blocks(operator, [parameter.numel() for parameter in parameters])
    found = curvature(model, (x, y), likelihood, expand_bias=True)
    assert len(theirs) == len(found.factors)
    for name, block in zip(found.factors, theirs, strict=True):
        assert_close(doubled * oracles.kron_blocks(found, name)[0], block, rtol=1e-9, atol=1e-10)


def test_paths_that_are_left_out_get_no_factors_and_the_others_keep_theirs():
    model, data = mlp(5, 4, 3), draw("categorical", 8)
    every = curvature(model, data)
    left = [name for name in every.factors if name.endswith("bias")]
    found = curvature(model, data, without=left)
    assert found.factors.keys() == every.factors.keys() - set(left)
    assert left
    for name, factors in found.factors.items():
        assert torch.equal(factors.A, every.factors[name].A)
        assert torch.equal(factors.G, every.factors[name].G)
