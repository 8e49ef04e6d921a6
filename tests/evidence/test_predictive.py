import copy
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.testing import assert_close

import autosym
import oracles
from autosym import Categorical, Gaussian, calibration_error
from autosym.curvature.kronecker import kfac
from autosym.curvature.owners import sites
from autosym.evidence.predictive import scores
from models import convnet, draw, eye, mlp, owned, relaxed


def at_weights(model, data, likelihood, precision=None):
    """A fit that leaves the weights where they are; by default with another precision for every path."""
    if precision is None:
        precision = {site.name: 0.3 + 0.2 * i for i, site in enumerate(sites(model))}
    return autosym.fit(model, data, likelihood, prior_precision=precision, step="none", epochs=1, lr=1e-30)


# ---- closed forms


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize(("precision", "sigma"), [(1.0, 1.0), (0.2, 0.5), (30.0, 2.0)])
def test_gaussian_predictive_is_bayesian_linear_regression(precision, sigma, outputs):
    phi = torch.cat([torch.randn(20, 4), torch.ones(20, 1)], 1).double()
    y, new = torch.randn(20, outputs, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    sigma_w = torch.linalg.inv(phi.T @ phi / sigma**2 + precision * eye(5))
    model = nn.Linear(5, outputs, bias=False).double()
    model.weight.data = (sigma_w @ phi.T @ y / sigma**2).T.contiguous()
    found = at_weights(model, (phi, y), Gaussian(sigma), precision).predictive(new)
    of_f = torch.einsum("ni,ij,nj->n", new, sigma_w, new)
    exact = {"rtol": 1e-8, "atol": 1e-8}
    assert_close(found.mean, new @ sigma_w @ phi.T @ y / sigma**2, **exact)
    assert_close(found.covariance, of_f[:, None, None] * eye(outputs), **exact)
    assert_close(found.variance, of_f[:, None].expand(-1, outputs) + sigma**2, **exact)
    assert found.probabilities is None


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: relaxed("f-fc+conv"), (2, 4, 4)),
        (lambda: relaxed("fc+conv"), (2, 4, 4)),
        (lambda: convnet(activation=nn.Tanh, groups=2), (2, 6, 5)),
        (lambda: mlp(5, 4, 3), (5,)),
    ],
    ids=["f-fc+conv", "fc+conv", "torch's grouped convolution", "torch's linear"],
)
def test_covariance_is_the_dense_one(make, shape, likelihood):
    """sum over paths of J Sigma J^T, with Sigma the inverse of kron(G, A) / sigma^2 + delta I and J by torch.func."""
    model, data = make(), draw(likelihood, 6, shape)
    kind = Categorical() if likelihood == "categorical" else Gaussian(0.6)
    scale = 1.0 if likelihood == "categorical" else 1 / 0.36
    fit = at_weights(model, data, kind)
    new, curvature = torch.randn(4, *shape, dtype=torch.float64), kfac(model, data, kind)
    expected = torch.zeros(4, 3, 3, dtype=torch.float64)
    for path, name in owned(model):
        parameter = dict(model.named_parameters())[name].detach()
        jacobian = jacrev(lambda p, name=name: functional_call(model, {name: p}, (new,)))(parameter).reshape(4, 3, -1)
        delta = fit.prior.precision()[path]
        blocks = [torch.linalg.inv(scale * block + delta * eye(len(block))) for block in oracles.kron_blocks(curvature, path)]
        expected += jacobian @ torch.block_diag(*blocks) @ jacobian.mT
    found = fit.predictive(new)
    assert_close(found.covariance, expected.detach(), rtol=1e-9, atol=1e-9)
    assert_close(found.mean, model(new).detach(), rtol=0, atol=0)
    if likelihood == "gaussian":
        assert_close(found.variance, found.covariance.diagonal(dim1=1, dim2=2) + 0.36, rtol=1e-12, atol=0)
        assert found.probabilities is None
    else:
        assert found.variance is None


# ---- probabilities


def of_classifier(width=1.0, link="probit", **options):
    """The predictive, by all of its covariance, of a classifier whose weights are uncertain in proportion to ``width``."""
    torch.manual_seed(0)
    model, data = mlp(5, 4, 3), draw("categorical", 30)
    model[-1].weight.data *= 4  # a network that is sure of itself
    return at_weights(model, data, "categorical", 4 / width).predictive(2 * data[0], link, scale=1.0, **options)


def integrated(found, samples=50_000):
    """The softmax averaged over the Gaussian of the outputs, one sample of the data at a time."""
    averages = []
    for mean, covariance in zip(found.mean, found.covariance, strict=True):
        normal = torch.distributions.MultivariateNormal(mean, covariance + 1e-12 * eye(3))
        averages.append(normal.sample((samples,)).softmax(-1).mean(0))
    return torch.stack(averages)


@pytest.mark.parametrize(("link", "part"), [("probit", 0.7), ("monte-carlo", 0.05)])
def test_links_are_closer_to_the_integral_than_the_plug_in(link, part):
    """The probit leaves out how the outputs vary together: measured, its error is 0.61 of the plug-in's."""
    found = of_classifier(link=link, samples=20_000)
    truth, plug_in = integrated(found), found.mean.softmax(-1)
    away = (plug_in - truth).abs().mean()
    assert away > 0.05, "the uncertainty would not be seen"
    assert (found.probabilities - truth).abs().mean() < part * away


def test_probit_by_hand():
    found = of_classifier()
    centring = eye(3) - 1 / 3  # a shift of all outputs changes no probability
    variance = torch.stack([(centring @ covariance @ centring).diag() for covariance in found.covariance])
    expected = (found.mean @ centring / (1 + math.pi * variance / 8).sqrt()).softmax(-1)
    assert_close(found.probabilities, expected, rtol=1e-12, atol=0)


def test_no_link_sees_a_shift_of_all_outputs():
    """By its mean, or by what the outputs vary together."""
    found = of_classifier()
    more = Categorical().predict(found.mean + 5, found.covariance + 7, None)
    assert_close(more["probabilities"], found.probabilities, rtol=1e-10, atol=0)


@pytest.mark.parametrize("link", ["probit", "monte-carlo"])
def test_probabilities_sum_to_one(link):
    probabilities = of_classifier(link=link).probabilities
    assert_close(probabilities.sum(1), torch.ones(30).double(), rtol=0, atol=1e-12)
    assert probabilities.min() > 0


@pytest.mark.parametrize("link", ["probit", "monte-carlo"])
def test_probabilities_without_uncertainty_are_the_softmax(link):
    found = of_classifier(1e-14, link)
    assert found.covariance.abs().max() < 1e-10
    assert_close(found.probabilities, found.mean.softmax(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("link", ["probit", "monte-carlo"])
def test_uncertainty_takes_confidence(link):
    sure, unsure = (of_classifier(width, link, samples=4096).probabilities.max(1).values.mean() for width in (0.1, 10.0))
    assert 1 / 3 < unsure < sure - 0.05


@pytest.mark.parametrize("link", ["probit", "monte-carlo"])
def test_the_scale_is_of_the_covariance_that_predicts(link):
    """Without data and scale the probabilities of classes are the softmax; the covariance is that of the posterior at any scale."""
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 30)
    fit = at_weights(model, (x, y), "categorical", 0.1)
    default, none, part, whole = (fit.predictive(x, link, **o) for o in ({}, {"scale": 0.0}, {"scale": 0.3}, {"scale": 1.0}))
    assert_close(default.probabilities, model(x).detach().softmax(1), rtol=1e-12, atol=0)
    assert torch.equal(default.probabilities, none.probabilities)
    assert all(torch.equal(found.covariance, whole.covariance) for found in (default, part))
    if link == "probit":
        by_hand = Categorical().predict(whole.mean, 0.3 * whole.covariance, None)["probabilities"]
        assert_close(part.probabilities, by_hand, rtol=1e-12, atol=0)
    away = [float((found.probabilities - none.probabilities).abs().mean()) for found in (part, whole)]
    assert 0.001 < away[0] < 0.9 * away[1]


@pytest.mark.parametrize("scale", [-0.1, math.inf, math.nan])
def test_a_scale_without_sense_is_refused(scale):
    fit = at_weights(mlp(5, 4, 3), draw("categorical", 6), "categorical")
    with pytest.raises(ValueError, match="scale must be a number, finite and not negative"):
        fit.predictive(torch.randn(2, 5).double(), scale=scale)


def test_monte_carlo_is_deterministic_by_seed():
    first, again, other = (of_classifier(link="monte-carlo", seed=seed).probabilities for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_inputs_that_are_no_tensor_are_refused():
    fit, (x, y) = at_weights(mlp(5, 4, 3), draw("categorical", 6), "categorical"), draw("categorical", 6)
    with pytest.raises(TypeError, match=r"are a ndarray: give a tensor \(B, ...\), e\.g\. torch\.as_tensor\(array\)$"):
        fit.predictive(x.numpy())
    with pytest.raises(TypeError, match="are a tuple: give a tensor"):
        fit.predictive((x, y))


def test_an_unknown_link_is_named():
    with pytest.raises(ValueError, match="link must be 'probit' or 'monte-carlo', got 'laplace'"):
        of_classifier(link="laplace")


# ---- how it is called


@pytest.mark.parametrize("link", ["probit", "monte-carlo"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_prediction_does_not_depend_on_its_batchmates(size, link):
    data = draw("categorical", 6, (2, 4, 4))
    fit = at_weights(relaxed(), data, "categorical")
    whole = fit.predictive(data[0], link, scale=0.7)
    parts = [fit.predictive(x, link, scale=0.7) for x in data[0].split(size)]
    for name in ("mean", "covariance", "probabilities"):
        assert_close(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name), rtol=1e-10, atol=1e-12)


def test_large_jacobians_are_taken_in_parts():
    """128 outputs of 128 x 1024 weights: two samples at a time."""
    model, x, seen = nn.Linear(1024, 128, bias=False).double(), torch.randn(3, 1024).double(), []
    fit = at_weights(model, (x, torch.randn(3, 128).double()), Gaussian(), 3.0)
    model.register_forward_hook(lambda _, inputs, output: seen.append(len(output)))
    found = fit.predictive(x)
    assert seen == [1, 2, 1], "one to count the outputs, then the parts"
    of_f = torch.einsum("ni,ni->n", x, torch.linalg.solve(x.T @ x + 3 * eye(1024), x.T).T)
    assert_close(found.covariance, of_f[:, None, None] * eye(128), rtol=1e-8, atol=1e-8)


def test_a_model_in_float32_is_close():
    model, (x, y) = relaxed(), draw("categorical", 8, (2, 4, 4))
    exact = at_weights(model, (x, y), "categorical").predictive(x, scale=1.0)
    found = at_weights(model.float(), (x.float(), y), "categorical").predictive(x.float(), scale=1.0)
    assert_close(found.covariance, exact.covariance, rtol=1e-3, atol=1e-3)
    assert_close(found.probabilities, exact.probabilities, rtol=1e-3, atol=1e-3)


def test_the_model_is_left_as_it_was():
    model, data = relaxed(), draw("categorical", 6, (2, 4, 4))
    before = copy.deepcopy(model.state_dict())
    at_weights(model, data, "categorical").predictive(data[0])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_batch_dependence_is_refused():
    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3)).double().eval()
    data = draw("categorical", 6)
    fit = at_weights(model, data, "categorical")
    model.train()
    with pytest.raises(ValueError, match=r"1 \(Dropout\) is in train mode"):
        fit.predictive(data[0])


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_a_fit_predicts_at_its_end(likelihood):
    """With the precisions, the noise and the exact curvature of the end of the run."""
    model, (x, y) = mlp(5, 4, 3), draw(likelihood, 20)
    fit = autosym.fit(model, (x, y), likelihood, epochs=3, burn_in=0, every=1)
    expected = at_weights(model, (x, y), fit.likelihood, fit.prior.precision()).predictive(x, scale=1.0)
    found = fit.predictive(x, scale=1.0)
    assert_close(found.covariance, expected.covariance, rtol=1e-10, atol=0)
    if likelihood == "categorical":
        assert_close(found.probabilities, expected.probabilities, rtol=1e-10, atol=0)
    else:
        noise = math.exp(float(fit.likelihood.log_variance.detach()))
        assert noise != 1
        assert_close(found.variance, found.covariance.diagonal(dim1=1, dim2=2) + noise, rtol=1e-10, atol=0)


# ---- calibration


def told(*cases):
    """(confidence, whether right) pairs as probabilities of two classes and labels."""
    confidence = torch.tensor([c for c, _ in cases], dtype=torch.float64)
    labels = torch.tensor([int(not right) for _, right in cases])
    return torch.stack([confidence, 1 - confidence], 1), labels


@pytest.mark.parametrize(
    ("cases", "error"),
    [
        ([(0.75, True)] * 3 + [(0.75, False)], 0.0),
        ([(0.6, True)] * 3 + [(0.6, False)] * 2 + [(0.9, True)] * 9 + [(0.9, False)], 0.0),
        ([(1.0, True), (1.0, False)], 0.5),
        ([(1.0, True)], 0.0),
        ([(0.9, False)] * 4, 0.9),
        ([(0.6, True)] * 4, 0.4),
        ([(0.6, True)] * 2 + [(0.9, True), (0.9, False)], 0.4),
        ([(0.6, True)] * 3 + [(0.9, False)], (3 * 0.4 + 0.9) / 4),
        ([(0.90, True), (0.92, False)], 0.41),
    ],
    ids=[
        "calibrated",
        "calibrated in two bins",
        "overconfident",
        "certain and right",
        "always wrong",
        "underconfident",
        "bins do not cancel",
        "weighted by counts",
        "one bin is averaged",
    ],
)
def test_calibration_error_by_hand(cases, error):
    assert calibration_error(*told(*cases)) == pytest.approx(error, abs=1e-12)


def test_scores_by_hand():
    """Three of four right: the error of the mean is sqrt(p (1 - p) / (n - 1)), that of independent samples."""
    found = scores(torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1, 0, 0]))
    assert found.accuracy == 0.75
    assert found.standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    assert found.nll == pytest.approx(sum(math.log1p(math.exp(-margin)) for margin in (2, 1, 3, -1)) / 4)


def test_calibration_error_depends_on_the_bins():
    cases = told((0.55, True), (0.95, False))
    assert calibration_error(*cases, bins=1) == pytest.approx(0.25)
    assert calibration_error(*cases, bins=10) == pytest.approx((0.45 + 0.95) / 2)


def test_calibration_error_of_the_truth_is_small():
    probabilities = (3 * torch.randn(20_000, 4, dtype=torch.float64)).softmax(1)
    labels = torch.distributions.Categorical(probabilities).sample()
    assert calibration_error(probabilities, labels) < 0.02
    sharper = (probabilities**3) / (probabilities**3).sum(1, keepdim=True)
    assert calibration_error(sharper, labels) > 0.05
