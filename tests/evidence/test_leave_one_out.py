"""Leave-one-out against real refits, in float64, and what it chooses where the right choice is known."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from autosym import Categorical
from autosym.evidence import leave_one_out
from autosym.evidence.leave_one_out import WIDTH, Tuning, cavity, tune
from models import eye


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize(("precision", "noise"), [(0.5, 1.0), (3.0, 0.4)])
def test_ridge_regression_is_exact(precision, noise, outputs):
    """Mean and covariance of every sample are those of a regression without it."""
    x, y = torch.randn(12, 5).double(), torch.randn(12, outputs).double()

    def posterior(x, y):
        covariance = torch.linalg.inv(x.T @ x / noise**2 + precision * eye(5))
        return covariance @ x.T @ y / noise**2, covariance

    weights, covariance = posterior(x, y)
    of_f = torch.einsum("ni,ij,nj->n", x, covariance, x)[:, None, None] * eye(outputs)
    hessian = eye(outputs).expand(12, -1, -1) / noise**2
    means, covariances = cavity(x @ weights, of_f, (x @ weights - y) / noise**2, hessian)
    for i in range(12):
        others = torch.arange(12) != i
        weights, covariance = posterior(x[others], y[others])
        assert_close(means[i], x[i] @ weights, rtol=1e-10, atol=1e-10)
        assert_close(covariances[i], x[i] @ covariance @ x[i] * eye(outputs), rtol=1e-10, atol=1e-10)


def softmax_regression(x, y, precision, classes=3):
    """The weights (classes, in) at the mode, and H + D (classes in, classes in)."""
    weights = torch.zeros(classes, x.shape[1]).double()
    for _ in range(30):
        p = (x @ weights.T).softmax(1)
        slope = (p - F.one_hot(y, classes)).T @ x + precision * weights
        curvature = torch.einsum("nab,ni,nj->aibj", torch.diag_embed(p) - p[:, :, None] * p[:, None], x, x)
        matrix = curvature.reshape(weights.numel(), -1) + precision * eye(weights.numel())
        weights = weights - torch.linalg.solve(matrix, slope.flatten()).view_as(weights)
    return weights, matrix


def test_logistic_regression_is_close_to_real_refits():
    torch.manual_seed(0)
    x = torch.randn(60, 4).double()
    y = (2 * x @ torch.randn(4, 3).double() + torch.randn(60, 3)).argmax(1)
    weights, matrix = softmax_regression(x, y, 1.0)
    f = x @ weights.T
    p = f.softmax(1)
    J = torch.einsum("ab,ni->nabi", eye(3), x).flatten(2)
    covariance = J @ torch.linalg.inv(matrix) @ J.mT
    slope, hessian = p - F.one_hot(y, 3), torch.diag_embed(p) - p[:, :, None] * p[:, None]
    found, _ = cavity(f, covariance, slope, hessian)
    others = [torch.arange(60) != i for i in range(60)]
    exact = torch.stack([softmax_regression(x[o], y[o], 1.0)[0] @ x[i] for i, o in enumerate(others)])
    moved = (exact - f).abs().mean()
    assert moved > 0.05, "the test would see nothing"
    assert (found - exact).abs().mean() < 0.1 * moved
    assert (found - f).flatten().dot((exact - f).flatten()) > 0
    own = torch.arange(60), y
    assert (found[own] < f[own]).all(), "without its own label a sample is less sure of it"


def problem(factor, samples=600):
    """Outputs that are ``factor`` times the logits by which their labels were drawn, and a covariance of unit size."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(samples, 4).double()
    y = torch.distributions.Categorical(logits=logits).sample()
    return factor * logits, y, eye(4).expand(samples, -1, -1)


@pytest.mark.parametrize("link", ["probit", "monte-carlo"])
def test_timid_outputs_are_sharpened_and_bold_ones_softened(link, monkeypatch):
    monkeypatch.setattr(leave_one_out, "DRAWS", 32)
    f, y, covariance = problem(0.5)
    timid = tune(Categorical(), (f,), covariance, y, link)
    assert timid.temperature < 0.7
    assert timid.scale >= WIDTH * (1 - timid.temperature) > 0
    f, y, covariance = problem(3.0)
    bold = tune(Categorical(), (f,), covariance, y, link)
    assert bold.temperature > 1.3 or bold.scale > 0.5


def test_nothing_is_changed_without_a_clear_gain(monkeypatch):
    f, y, covariance = problem(1.0)
    assert tune(Categorical(), (f,), covariance, y) == Tuning(1.0, 0.0)
    f, y, covariance = problem(0.9, samples=30)
    assert tune(Categorical(), (f,), covariance, y) == Tuning()
    monkeypatch.setattr(leave_one_out, "ERRORS", 0.0)
    assert tune(Categorical(), (f,), covariance, y) != Tuning(), "there was a gain, within its standard error"


def test_estimates_have_to_agree():
    (timid, y, covariance), (bold, _, _) = problem(0.5), problem(3.0)
    assert tune(Categorical(), (timid, bold), covariance, y) == Tuning()
    assert tune(Categorical(), (timid, timid), covariance, y) != Tuning()


def test_of_many_samples_some_are_chosen(monkeypatch):
    f, y, covariance = problem(0.5)
    monkeypatch.setattr(leave_one_out, "MOST", 300)
    seen = []
    monkeypatch.setattr(
        Categorical, "predict", lambda self, mean, *rest: seen.append(mean) or {"probabilities": mean.softmax(1)}
    )
    tune(Categorical(), (f,), covariance, y)
    assert {len(mean) for mean in seen} == {300}
