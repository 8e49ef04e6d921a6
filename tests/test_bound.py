"""The variational bound at the Gaussian of a Laplace fit: exact for squared loss, below the evidence of a classifier, far below if sure."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.testing import assert_close

import autosym
import oracles
from autosym import Gaussian
from models import draw, mlp


def at_weights(model, data, likelihood="categorical", precision=1.0):
    """A fit that leaves the weights where they are."""
    return autosym.fit(model, data, likelihood, prior_precision=precision, step="none", epochs=1, lr=1e-30)


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False).double()


@pytest.mark.parametrize(("precision", "sigma"), [(1.0, 1.0), (0.2, 0.5), (30.0, 2.0)])
def test_of_linear_regression_it_is_the_exact_evidence(precision, sigma):
    phi, y = torch.randn(20, 4, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    model = linear(4, 1)
    covariance = torch.linalg.inv(phi.T @ phi / sigma**2 + precision * torch.eye(4))
    model.weight.data = (covariance @ phi.T @ y / sigma**2).T.contiguous()
    fit = at_weights(model, (phi, y), Gaussian(sigma), precision)
    found = fit.bound((phi, y))
    marginal = MultivariateNormal(torch.zeros(20).double(), phi @ phi.T / precision + sigma**2 * torch.eye(20))
    assert found.bound == pytest.approx(float(marginal.log_prob(y[:, 0])), rel=1e-9)
    assert found.log_evidence == pytest.approx(found.bound, rel=1e-9)
    assert found.gap == pytest.approx(0, abs=1e-9)
    assert found.standard_error == 0, "all samples were looked at"


def test_of_a_linear_classifier_it_is_the_bound_by_draws_of_the_weights():
    """E_q log p(y | w) - KL(q, prior), with q as a dense Gaussian and torch's own KL."""
    x, y = draw("categorical", 30, (4,))
    model, precision = linear(4, 3), 0.7
    fit = at_weights(model, (x, y), precision=precision)
    blocks = oracles.kron_blocks(fit.laplace.curvature, "weight")
    covariance = torch.linalg.inv(torch.block_diag(*blocks) + precision * torch.eye(12))
    q = MultivariateNormal(model.weight.detach().flatten(), covariance)
    prior = MultivariateNormal(torch.zeros(12).double(), torch.eye(12).double() / precision)
    logits = torch.einsum("skd,nd->snk", q.sample((200_000,)).reshape(-1, 3, 4), x)
    expected = logits.log_softmax(-1)[:, torch.arange(30), y].sum(1).mean() - kl_divergence(q, prior)
    assert_close(fit.bound((x, y), draws=100_000).bound, float(expected), rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("precision", [0.01, 0.3, 10.0])
@pytest.mark.parametrize("size", [0.0, 1.0, 10.0])
def test_of_two_weights_it_is_below_their_evidence(size, precision):
    """By quadrature; wherever the Gaussian is, at a mode or not."""
    x, y = draw("categorical", 12, (1,))
    x, y = x[:, :1], y % 2
    model = linear(1, 2)
    model.weight.data = size * torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    found = at_weights(model, (x, y), precision=precision).bound((x, y), draws=4000)
    grid = torch.linspace(-8, 8, 801, dtype=torch.float64) / math.sqrt(precision)
    w = torch.cartesian_prod(grid, grid)
    log_likelihood = sum((w * float(a)).log_softmax(-1)[:, int(b)] for a, b in zip(x, y, strict=True))
    log_prior = -0.5 * precision * w.square().sum(1) + math.log(precision / (2 * math.pi))
    evidence = float((log_likelihood + log_prior).logsumexp(0) + 2 * (grid[1] - grid[0]).log())
    assert found.bound < evidence


@pytest.fixture(scope="module")
def separable():
    """Classes that can be told apart, and two fits: with a wide prior and long, so that it is sure of them, and as by default."""
    torch.manual_seed(0)
    x = torch.randn(200, 5, dtype=torch.float64)
    data = x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    sure = autosym.fit(mlp(5, 8, 3), data, epochs=800, step="none", prior_precision=1e-3)
    return data, sure, autosym.fit(mlp(5, 8, 3), data, epochs=200)


def test_a_classifier_that_is_sure_of_its_data_is_far_above_its_bound(separable):
    """Its curvature vanishes, Laplace makes its Gaussian wide, and most of that contradicts the data."""
    data, sure, learned = separable
    assert sure.bound(data).gap > 1 > 0.02 > learned.bound(data).gap > 0


def test_a_comparison_says_who_is_sure(separable):
    _, sure, learned = separable
    found = {model.name: " ".join(model.warnings) for model in autosym.compare({"sure": sure, "learned": learned}).models}
    assert "so sure of its training data" in found["sure"]
    assert "fit.bound(data)" in found["sure"]
    assert "so sure" not in found["learned"]


def test_who_fits_exactly_by_squared_loss_is_not_warned_of():
    """There Laplace is right, however small the noise."""
    x = torch.randn(30, 5, dtype=torch.float64)
    fits = {}
    for name in "ab":
        model = linear(5, 1)
        model.weight.data = torch.eye(5, dtype=torch.float64)[:1]
        fits[name] = at_weights(model, (x, x[:, :1]), Gaussian(1e-3))
    assert not any("so sure" in warning for model in autosym.compare(fits).models for warning in model.warnings)


def test_some_samples_stand_for_all():
    x, y = draw("categorical", 400, (5,))
    fit = at_weights(mlp(5, 4, 3), (x, y))
    whole = fit.bound((x, y), look_at=400, draws=2000)
    found = [fit.bound((x, y), look_at=40, draws=2000, seed=seed) for seed in range(20)]
    assert whole.standard_error == 0 == fit.bound((x, y), look_at=1000).standard_error
    errors = torch.tensor([(f.bound - whole.bound) / f.standard_error for f in found])
    assert 0.5 < errors.square().mean().sqrt() < 1.6, "as large as they say"
    assert found[0] == fit.bound((x, y), look_at=40, draws=2000, seed=0) != found[1]


def test_it_prints_as_a_sentence():
    x, y = draw("categorical", 60, (5,))
    found = at_weights(mlp(5, 4, 3), (x, y)).bound((x, y), look_at=30)
    text = str(found)
    assert f"log evidence {found.log_evidence:.1f} nats by Laplace" in text
    assert f"{found.gap:.3f} ± {found.standard_error / 60:.3f} nats a sample below" in text


def test_what_it_cannot_be_of_is_refused():
    x, y = draw("categorical", 30, (5,))
    fit = at_weights(mlp(5, 4, 3), (x, y))
    with pytest.raises(ValueError, match="these 20 samples are not the 30"):
        fit.bound((x[:20], y[:20]))
    with pytest.raises(ValueError, match="these 30 samples are not the 30"):
        fit.bound((x + 1, y))
    with pytest.raises(ValueError, match="must be between 1 and the 30 samples"):
        fit.bound((x, y), look_at=0)
    student = autosym.fit(mlp(5, 4, 3), (x, y), epochs=1, nu=4)
    with pytest.raises(ValueError, match="Student-t prior"):
        student.bound((x, y))
    kernel = autosym.fit(mlp(5, 4, 3), (x, y), epochs=1, kernel=4)
    with pytest.raises(ValueError, match="kernel evidence"):
        kernel.bound((x, y))
    with torch.no_grad():
        next(fit.model.parameters()).add_(1)
    with pytest.raises(ValueError, match="changed after the fit"):
        fit.bound((x, y))
