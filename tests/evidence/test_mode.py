"""The mode of the linearised network, and the evidence there."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp

import autosym
from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Gaussian
from autosym.bayes.priors import Prior
from autosym.curvature.gauss_newton import GaussNewton, flat
from autosym.evidence import laplace, mode, whole
from autosym.nn import nets
from autosym.training.fitted import load


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)).double()


def waves(outputs=None):
    torch.manual_seed(1)
    x = torch.randn(40, 1, 8).double()
    return x, torch.randn(40, outputs).double() if outputs else torch.arange(40) % 3


def taken(model, data, likelihood, precision=0.7):
    at = laplace.at(model, data, likelihood)
    return at, Prior(at.names, precision)


def test_the_mode_of_a_linear_regression_is_exact_in_one_step():
    torch.manual_seed(0)
    x, y = torch.randn(50, 6).double(), torch.randn(50, 2).double()
    model = nn.Linear(6, 2).double()
    at, prior = taken(model, (x, y), Gaussian(0.3), 2.0)
    found = mode.linearised(model, (x, y), at, prior)
    assert found.steps == 1
    assert found.left < 1e-12
    inputs = torch.cat([x, torch.ones(50, 1).double()], 1)
    exact = torch.linalg.solve(inputs.T @ inputs + 2.0 * 0.3**2 * torch.eye(7).double(), inputs.T @ y).T
    torch.testing.assert_close(found.offset, flat([exact[:, :6], exact[:, 6]]) - flat(model.parameters()))
    there = copy.deepcopy(model)
    with torch.no_grad():
        there.weight.copy_(exact[:, :6])
        there.bias.copy_(exact[:, 6])
    moved = whole.at(model, (x, y), at, prior, offset=found.offset).evidence
    own = whole.at(there, (x, y), taken(there, (x, y), Gaussian(0.3), 2.0)[0], prior).evidence
    assert float(moved.log_evidence) == pytest.approx(float(own.log_evidence))
    joints = [float((one.log_likelihood + one.log_prior).detach()) for one in (moved, at(prior))]
    assert found.gain == pytest.approx(joints[0] - joints[1])


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_the_mode_is_a_stationary_point_of_the_linearised_network(likelihood):
    """Against the network linearised by forward differentiation: the slope of its log joint density vanishes there."""
    model, data = network(), waves(None if likelihood == "categorical" else 3)
    at, prior = taken(model, data, likelihood)
    found = mode.linearised(model, data, at, prior, nats=1e-10)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    pieces = dict(zip(weights, found.offset.split([p.numel() for p in weights.values()]), strict=True))
    offset = {name: pieces[name].view_as(p).clone().requires_grad_() for name, p in weights.items()}
    f, change = jvp(lambda w: functional_call(model, w, (data[0],)), (weights,), (offset,))
    prior_part = sum((weights[name] + offset[name]).square().sum() for name in weights) * 0.7 / 2
    loss = likelihoods.of(likelihood).loss(f + change, data[1]) + prior_part
    slopes = torch.autograd.grad(loss, list(offset.values()))
    assert max(float(slope.abs().max()) for slope in slopes) < 1e-4
    assert found.gain > 0
    assert found.steps == 1 if likelihood == "gaussian" else found.steps > 1


@pytest.mark.parametrize("how", ["weights", "rows", "probes"])
def test_evidence_at_an_offset_is_that_of_the_linearised_network(how):
    """Likelihood and Hessian are taken at the shifted outputs, J where it was."""
    model, data = network(), waves()
    at, prior = taken(model, data, "categorical")
    offset = 0.3 * torch.randn(sum(p.numel() for p in model.parameters()), generator=torch.Generator().manual_seed(3)).double()
    found = whole.at(model, data, at, prior, how=how, offset=offset, nats=0.5)
    names, shapes = zip(*((n, p) for n, p in model.named_parameters()), strict=True)
    J = torch.func.jacrev(lambda w: functional_call(model, w, (data[0],)))(dict(model.named_parameters()))
    J = torch.cat([J[name].detach().flatten(2) for name in names], 2)
    f = model(data[0]).detach() + J @ offset
    root = likelihoods.of("categorical").root(f)
    rows = torch.einsum("bdc,bdp->bcp", root, J).flatten(0, 1)
    log_det = torch.logdet(torch.eye(J.shape[2]).double() + rows.T @ rows / 0.7)
    w = flat(shapes) + offset
    expected = -float(nn.functional.cross_entropy(f, data[1], reduction="sum")) - 0.35 * float(w @ w) - 0.5 * float(log_det)
    assert float(found.evidence.log_evidence) == pytest.approx(expected, abs=1e-8 if how != "probes" else 3.0)
    assert torch.allclose(GaussNewton(model, data, likelihoods.of("categorical")).along()[0], model(data[0]))


def test_a_fit_tells_how_far_its_mode_is():
    data = waves()
    fit = autosym.fit(network(), data, epochs=5)
    found = fit.mode(data)
    assert found.gain > 0
    with pytest.raises(ValueError, match="not the 40"):
        fit.mode((data[0][:20], data[1][:20]))


def test_a_refined_fit_is_saved_and_has_its_own_shares(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(30, 1, 8, 8), torch.arange(30) % 3
    model = nets.build("f-fc+conv", (1, 8, 8), 3, width=2, channels=(1, 2), strides=(2, 2), hidden=2)
    fit = autosym.fit(model, (x, y), epochs=4)
    refined = fit.refine((x, y))
    assert refined.evidence.standard_error == 0
    assert float(refined.evidence.log_evidence) > float(fit.evidence.log_evidence)
    gammas = [sum(path.effective_parameters for path in one.symmetry()) for one in (refined, fit)]
    assert gammas[0] < gammas[1], "Kronecker factors count too many"
    refined.save(tmp_path)
    again = load(tmp_path, copy.deepcopy(model))
    assert again.estimate.how == refined.estimate.how
    assert str(again.symmetry()) == str(refined.symmetry())
    assert float(again.evidence.log_evidence) == float(refined.evidence.log_evidence)
    with pytest.raises(ValueError, match="one prior only"):
        refined.estimate(Prior(refined.prior.names, 3.0))


def test_the_mode_is_for_gaussian_priors_over_the_same_paths():
    model, data = network(), waves()
    at, _ = taken(model, data, "categorical")
    with pytest.raises(ValueError, match="Gaussian priors: pass nu=inf"):
        mode.linearised(model, data, at, Prior(at.names, nu=3.0))
    with pytest.raises(ValueError, match=r"use Prior\(evidence.names\)"):
        mode.linearised(model, data, at, Prior(at.names[1:]))
