"""Weight steps end at the MAP, evidence steps at the maximum of the evidence."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import nn
from torch.testing import assert_close

import autosym
import oracles
from autosym import Gaussian, Prior, Schedule
from autosym.evidence import laplace
from autosym.evidence.laplace import LOG_PRECISION_RANGE
from models import OPTIMISERS, draw, eye, linear, mlp, regression

# ---- weight steps: the fixed point is the MAP


def at_map(model, data, likelihood, precision, optimiser, epochs=500, lr=0.1, relative=False):
    """Enough steps of Adam at 0.05, or of SGD at ``lr``, to come to the MAP; in units of the weights themselves."""
    rate = {"lr": lr if optimiser == "sgd" else 0.05, "relative": relative}
    options = {"optimiser": optimiser, "batch_size": len(data[0]), **rate}
    return autosym.fit(model, data, likelihood, prior_precision=precision, step="none", epochs=epochs, **options)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("precision", [1e-2, 1.0, 1e8], ids="{:g}".format)
def test_linear_regression_ends_at_ridge(precision, optimiser):
    (x, y), model, sigma = regression(), linear(), 0.7
    ridge = torch.linalg.solve(x.T @ x / sigma**2 + precision * eye(5), x.T @ y / sigma**2).T
    fit = at_map(model, (x, y), Gaussian(sigma), precision, optimiser)
    assert_close(model.weight.detach(), ridge, rtol=1e-5, atol=0)
    assert all(math.isfinite(line["loss"]) for line in fit.history)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("precision", [1.0, 30.0, 1e8], ids="{:g}".format)
def test_logistic_regression_ends_where_the_gradient_vanishes(precision, optimiser):
    (x, y), model = draw("categorical", 40), linear(5, 3)
    at_map(model, (x, y), "categorical", precision, optimiser, epochs=800, lr=0.5)
    of_likelihood = torch.autograd.grad(-F.cross_entropy(model(x), y, reduction="sum"), model.weight)[0]
    of_prior = -precision * model.weight.detach()
    assert of_prior.abs().max() > 0.1, "neither part vanishes by itself"
    assert_close(of_likelihood, -of_prior, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_every_path_has_its_own_prior_in_a_weight_step(optimiser):
    """The MAP with one precision for the weights and another for the bias."""
    (x, y), model, precision = regression(), nn.Linear(5, 2).double(), {"weight": 20.0, "bias": 0.5}
    at_map(model, (x, y), Gaussian(), precision, optimiser, epochs=800)
    phi, delta = torch.cat([x, torch.ones(40, 1)], 1), torch.tensor([20.0] * 5 + [0.5]).double()
    ridge = torch.linalg.solve(phi.T @ phi + delta.diag(), phi.T @ y).T
    assert_close(torch.cat([model.weight, model.bias[:, None]], 1).detach(), ridge, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("relative", [False, True], ids=["plain", "relative"])
def test_the_map_is_where_adam_stays(relative):
    """Per weight, the likelihood's step and the prior's cancel exactly, also before Adam's moments have settled."""
    (x, y), model = regression(), linear()
    ridge = torch.linalg.solve(x.T @ x + 3 * eye(5), x.T @ y).T.contiguous()
    model.weight.data = ridge.clone()
    at_map(model, (x, y), Gaussian(), 3.0, "adam", epochs=20, relative=relative)
    assert_close(model.weight.detach(), ridge, rtol=1e-6, atol=0)


def one_step(model, data, precision, likelihood=None, **options):
    """A single step of SGD on all the data, at the full rate."""
    options = {"optimiser": "sgd", "warmup": 0.0, "epochs": 1, "batch_size": len(data[0]), "step": "none", **options}
    return autosym.fit(model, data, likelihood or Gaussian(), prior_precision=precision, **options)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_prior_step_is_proximal_and_never_clipped(momentum):
    """With the likelihood's gradient clipped away, a step is w / (1 + kappa), kappa = lr delta sigma^2 / (N (1 - momentum))."""
    data, model, sigma, delta, lr = regression(), linear(), 0.7, 30.0, 0.1
    before = model.weight.detach().clone()
    one_step(model, data, delta, Gaussian(sigma), lr=lr, momentum=momentum, clip=1e-30)
    kappa = lr * delta * sigma**2 / (40 * (1 - momentum))
    assert_close(model.weight.detach(), before / (1 + kappa), rtol=1e-12, atol=0)


def test_the_gradient_is_clipped_to_a_norm():
    (x, y), model = regression(), linear()
    before = model.weight.detach().clone()
    fit = one_step(model, (x, y), 1e-12, lr=1.0, clip=0.01)
    assert float((model.weight.detach() - before).norm()) == pytest.approx(0.01, rel=1e-5)
    assert fit.history[0]["loss"] == pytest.approx(float((x @ before.T - y).square().sum() / 80))


def test_the_rate_warms_up_and_falls_as_a_cosine():
    """Read off the steps themselves: without momentum or prior they are the rate times the gradient."""
    (x, y), model = regression(), linear()
    path = [model.weight.detach().clone()]
    log = lambda line: path.append(model.weight.detach().clone())  # noqa: E731
    one_step(model, (x, y), 1e-12, lr=0.1, momentum=0.0, warmup=0.3, epochs=5, log=log)
    steps = [(before - after) / ((before @ x.T - y.T) @ x / 40) for before, after in pairwise(path)]
    assert all(float(step.std()) < 1e-6 for step in steps)
    done = (0.0, 0.2, 0.4, 0.6, 0.8)
    rates = [0.05 * (1 + math.cos(math.pi * d)) * min(1, (d + 1e-3) / 0.3) for d in done]
    assert [float(step.mean()) for step in steps] == pytest.approx(rates, rel=1e-6)


# ---- evidence steps


def best_evidence(x, y):
    """The maximum of the exact log evidence over precision and noise: (delta, sigma^2, log evidence)."""

    def loss(logs):
        return -oracles.regression_log_evidence(x, y, math.exp(logs[0]), math.exp(logs[1] / 2))

    found = minimize(loss, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-10, "maxiter": 1000})
    return math.exp(found.x[0]), math.exp(found.x[1]), -found.fun


@pytest.mark.parametrize(
    ("step", "options", "tolerance"),
    [
        ("mackay", {}, 1e-4),
        ("mackay", {"damping": 0.3}, 1e-4),
        ("mackay", {"trust": 0.1}, 1e-4),
        ("gradient", {"hyper_lr": 0.02}, 0.05),
    ],
    ids=["mackay", "damped", "trust", "gradient"],
)
@pytest.mark.parametrize("start", [0.01, pytest.param(1.0, marks=pytest.mark.slow)])
def test_evidence_steps_find_the_maximum_of_the_closed_form(step, options, tolerance, start):
    (x, y), model = regression(noise=0.3), linear()
    delta, variance, value = best_evidence(x, y)
    schedule = Schedule(epochs=400, batch_size=40, optimiser="sgd", lr=0.1, step=step, every=2, sampled=False, **options)
    fit = autosym.fit(model, (x, y), Gaussian(3.0), schedule=schedule, prior_precision=start)
    assert fit.prior.precision()["weight"] == pytest.approx(delta, rel=tolerance)
    assert math.exp(float(fit.likelihood.log_variance.detach())) == pytest.approx(variance, rel=tolerance)
    assert float(fit.evidence.log_evidence) == pytest.approx(value, abs=max(tolerance, 1e-3))
    last = [line for line in fit.history if "sigma_noise" in line][-1]
    assert last["sigma_noise"] == pytest.approx(math.sqrt(variance), rel=tolerance)


def taken():
    """The evidence of a regression, a prior, and what its closed-form step should be: log delta by path, log sigma^2."""
    model, data, sigma = mlp(5, 4, 3), draw("gaussian", 12), 0.7
    found = laplace.at(model, data, Gaussian(sigma))
    prior = Prior(found.names, {name: 0.5 + i for i, name in enumerate(found.names)})
    gamma = found.effective_parameters(prior).detach()
    norms = [float(parameter.detach().square().sum()) for parameter in model.parameters()]
    errors = float((model(data[0]) - data[1]).detach().square().sum())
    target = (gamma / torch.tensor(norms, dtype=torch.float64)).log()
    return found, prior, target, math.log(errors / (12 * 3 - float(gamma.sum())))


def test_mackay_is_gamma_over_the_squared_norm():
    found, prior, target, log_variance = taken()
    found.mackay(prior)
    assert_close(prior.log_precision.detach(), target, rtol=1e-10, atol=1e-10)
    assert float(found.likelihood.log_variance.detach()) == pytest.approx(log_variance, rel=1e-10)


@pytest.mark.parametrize("damping", [0.25, 1.0])
@pytest.mark.parametrize("trust", [0.05, math.inf])
def test_damping_and_trust_bound_the_step(damping, trust):
    found, prior, target, log_variance = taken()
    start, start_variance = prior.log_precision.detach().clone(), 2 * math.log(0.7)
    step, variance_step = damping * (target - start), damping * (log_variance - start_variance)
    assert step.abs().min() > 0.01
    assert step.abs().max() > 0.05, "the bound would not be seen"
    found.mackay(prior, damping, trust)
    assert_close(prior.log_precision.detach() - start, step.clamp(-trust, trust), rtol=1e-9, atol=1e-12)
    moved = float(found.likelihood.log_variance.detach()) - start_variance
    assert moved == pytest.approx(max(-trust, min(trust, variance_step)), rel=1e-9)


def test_mackay_leaves_paths_without_weights_or_gamma_alone():
    """A bias of zeros, and weights that see only zeros."""
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 12)
    nn.init.zeros_(model[0].bias)
    found = laplace.at(model, (0 * x, y))
    prior = Prior(found.names, {name: 0.5 + i for i, name in enumerate(found.names)})
    before, gamma = prior.precision(), dict(zip(found.names, found.effective_parameters(prior).tolist(), strict=True))
    found.mackay(prior)
    after = prior.precision()
    assert gamma["0.weight"] == 0 < gamma["0.bias"]
    assert {name for name in before if after[name] != before[name]} == {"2.bias"}, "2.weight sees tanh(0)"
    assert all(math.isfinite(value) for value in after.values())


def test_mackay_stays_within_its_range():
    model, data = mlp(5, 4, 3), draw("gaussian", 12)
    nn.init.constant_(model[0].bias, 1e-20)
    nn.init.constant_(model[2].bias, 1e10)
    found = laplace.at(model, data, "gaussian")
    prior = Prior(found.names)
    found.mackay(prior)
    lowest, highest = (math.exp(bound) for bound in LOG_PRECISION_RANGE)
    assert prior.precision()["0.bias"] == pytest.approx(highest)
    assert prior.precision()["2.bias"] == pytest.approx(lowest)
