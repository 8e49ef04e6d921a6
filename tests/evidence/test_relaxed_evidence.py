"""Curvature, evidence and training of relaxed models, and of Conv1d."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import autosym
import oracles
from architectures import ARCHITECTURES, RELAXED, built, labels
from autosym.bayes.priors import Prior
from autosym.curvature.owners import sites
from autosym.evidence import laplace
from autosym.linear.conv import Conv
from models import EXACT, curvature, draw, exact_blocks, owned, randomised

# ---- curvature, evidence and training


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_curvature_and_evidence_are_finite_and_an_epoch_trains(name):
    model, x = built(name)
    relaxed = autosym.relax(model, x)
    at = laplace.at(relaxed, (x, labels()))
    assert torch.isfinite(at(Prior(at.names)).log_evidence)
    zero = {n: p for n, p in relaxed.named_parameters() if p.requires_grad and not p.any()}
    assert any("theta_1" in n for n in zero)
    fit = autosym.fit(relaxed, (x, labels()), epochs=1, batch_size=4, warmup=0.0)
    assert fit.evidence.log_evidence.isfinite()
    assert (relaxed(x) - model(x)).abs().max() > 1e-4
    assert all(p.abs().max() > 0 for n, p in zero.items() if "theta_1" in n)
    assert {p.layer for p in fit.symmetry()} == set(RELAXED[name])


def relaxed_net(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    x = torch.randn(48, 1, 6, 6)
    return autosym.relax(net, x[:4]), (x, (x[:, 0, 0, 0] > 0).long())


@pytest.mark.parametrize("step", ["mackay", "gradient"])
def test_precisions_are_held_through_burn_in(step):
    model, data = relaxed_net()
    seen = []
    fit = autosym.fit(model, data, epochs=6, burn_in=4, every=1, settle=0.0, step=step, log=seen.append, batch_size=12)
    assert [line["epoch"] for line in seen if "precision" in line] == [5, 6]
    assert fit.prior.precision()["0.f-fc.theta_1"] != 1.0
    model, data = relaxed_net()
    fit = autosym.fit(model, data, epochs=4, step="none", batch_size=12)  # the same epochs, without an evidence step
    assert set(fit.prior.precision().values()) == {1.0}


def test_a_closed_form_step_leaves_a_factor_that_is_still_zero_alone():
    model, data = relaxed_net()
    at = laplace.at(model, data)
    prior = Prior(at.names)
    at.mackay(prior)
    moved = {name for name, delta in prior.precision().items() if delta != 1.0}
    assert {n for n in at.names if n.startswith("0.f-fc.")}.isdisjoint(moved)  # theta_2 has no gamma yet, theta_1 no weights
    assert "0.conv.linear" in moved


@pytest.mark.parametrize("scale", [1.0, 0.01])
@pytest.mark.parametrize(("paths", "factor"), [("f-fc", "theta_1"), ("fc", "linear"), ("s-fc", "u_1")])
def test_a_factor_that_starts_at_zero_steps_in_the_size_that_matches_the_convolution(paths, factor, scale):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    model[0].weight.data.mul_(scale)
    x = torch.randn(8, 3, 6, 6)
    relaxed = autosym.relax(model, x, paths)
    path = relaxed[0][paths]
    weight, size = path.get_submodule(factor).weight, path.get_submodule(factor).start_size
    fit = autosym.fit(relaxed, (x, labels()), epochs=1, step="none", lr=0.01, warmup=0.0, prior_precision=1e-6)
    moved, rate = weight.detach(), size
    if paths == "s-fc":
        frame = path.get_submodule(factor).frame()
        moved, rate = frame.coordinates(moved), frame.unit(torch.zeros_like(moved), size)
    assert float(moved.abs().median()) == pytest.approx(0.01 * rate, rel=0.05)  # Adam's first step is the rate
    with torch.no_grad():
        weight.normal_(0, size)
        for bias in ("b_1", "b_2", "bias"):
            if hasattr(path, bias):
                path.get_submodule(bias).weight.zero_()
        free, symmetric = path(x), 2 * F.conv2d(x, model[0].weight)
    assert float(free.std() / symmetric.std()) == pytest.approx(1.0, rel=0.25)
    assert fit.model is relaxed


# ---- Conv1d and Conv3d in the evidence


FORMS = [
    {},
    {"stride": 2, "padding": 1},
    {"dilation": 2, "padding": "same"},
    {"groups": 2},
    {"padding": 2, "padding_mode": "circular"},
]


@pytest.mark.parametrize(("kind", "size"), [(nn.Conv1d, (9,)), (nn.Conv3d, (5, 6, 5))], ids=["1-d", "3-d"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_plain_convolution_of_sequences_or_volumes_is_read_as_one(form, kind, size):
    torch.manual_seed(0)
    model = nn.Sequential(kind(4, 2, 3, **form), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))
    model(torch.randn(1, 4, *size))
    model = randomised(model)
    x, y = draw("categorical", 2 if len(size) > 1 else 5, (4, *size))
    found = curvature(model, (x, y))
    (site,) = [s for s in sites(model) if s.name == "0.weight"]
    path = site.path(x, model[0](x))
    assert isinstance(path, Conv)
    own = Conv(*_arguments(path), dims=len(size)).double()
    own.weight.data = model[0].weight.detach().reshape(own.weight.shape)
    bias = model[0].bias.reshape(-1, *(1 for _ in size))
    assert_close(own(x) + bias, model[0](x), **EXACT)
    A, G = oracles.expand_factors(path, x, _cotangents(model, x))
    assert_close(found.factors["0.weight"].A, A, **EXACT)
    assert_close(found.factors["0.weight"].G, G, **EXACT)


def _arguments(path):
    out = path.weight.shape[0] * path.weight.shape[1]
    return path.in_channels, out, path.kernel_size, path.stride, path.padding, path.dilation, path.groups, path.padding_mode


def _cotangents(model, x):
    """Of the output of the first layer, for every column of the output Hessian's root: (N, columns, C', L')."""
    h = model[0](x).detach().requires_grad_()
    f = model[1:](h)
    p = f.softmax(-1)
    root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
    return torch.stack([torch.autograd.grad(f, h, root[..., c], retain_graph=True)[0] for c in range(f.shape[1])], 1).detach()


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_a_conv1d_of_one_position_is_exact(likelihood):
    model = randomised(nn.Sequential(nn.Conv1d(2, 4, 5), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)))
    x, y = draw(likelihood, 1, (2, 5))
    found = curvature(model, (x, y), likelihood)
    for path, parameter in owned(model):
        exact = exact_blocks(model, parameter, x, y, likelihood, 1)
        assert_close(oracles.kron_blocks(found, path), exact, **EXACT)
