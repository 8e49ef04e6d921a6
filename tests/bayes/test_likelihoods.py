import math

import pytest
import torch
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Normal
from torch.func import hessian, vmap

import oracles
from autosym.bayes.likelihoods import Bernoulli, Categorical, Gaussian, Poisson, of


def draw(name, samples=6, outputs=4):
    f = 2 * torch.randn(samples, outputs, dtype=torch.float64)
    y = torch.randint(outputs, (samples,)) if name == "categorical" else torch.randn_like(f)
    return f, y


@pytest.mark.parametrize("outputs", [1, 2, 5])
@pytest.mark.parametrize(("name", "sigma"), [("categorical", 1.0), ("gaussian", 1.0), ("gaussian", 0.3)])
def test_root_is_a_root_of_the_output_hessian(name, sigma, outputs):
    likelihood = Categorical() if name == "categorical" else Gaussian(sigma)
    f, y = draw(name, outputs=outputs)
    exact = vmap(hessian(oracles.negative_log_likelihood(name, sigma)))(f, y)
    root = likelihood.root(f)
    assert root.shape == (6, outputs, outputs - (name == "categorical"))
    torch.testing.assert_close(root @ root.mT * likelihood.scale().detach(), exact, rtol=1e-12, atol=1e-12)
    diagonal = likelihood.diagonal(f) * likelihood.scale().detach()
    torch.testing.assert_close(diagonal, exact.diagonal(dim1=1, dim2=2), rtol=1e-12, atol=1e-12)


def test_root_survives_saturated_outputs():
    f = torch.tensor([[1e4, 0.0, -1e4]], dtype=torch.float64)
    assert torch.isfinite(Categorical().root(f)).all()


def test_log_likelihood_categorical_is_torchs():
    f, y = draw("categorical")
    likelihood = Categorical()
    value = likelihood.log_likelihood(likelihood.statistic(f, y), 6 * 4)
    torch.testing.assert_close(value, TorchCategorical(logits=f).log_prob(y).sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 7.0])
def test_log_likelihood_gaussian_is_torchs(sigma):
    f, y = draw("gaussian")
    likelihood = Gaussian(sigma)
    value = likelihood.log_likelihood(likelihood.statistic(f, y), 6 * 4).detach()
    torch.testing.assert_close(value, Normal(f, sigma).log_prob(y).sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian()], ids=lambda kind: kind.name)
def test_statistics_add_over_batches(likelihood):
    f, y = draw(likelihood.name)
    parts = likelihood.statistic(f[:2], y[:2]) + likelihood.statistic(f[2:], y[2:])
    torch.testing.assert_close(parts, likelihood.statistic(f, y), rtol=1e-12, atol=1e-12)


def test_the_noise_is_learned():
    """The best noise of fixed residuals is their root mean square."""
    f, y = draw("gaussian")
    rms = (f - y).square().mean().sqrt()
    likelihood = Gaussian(float(rms))
    likelihood.log_likelihood(likelihood.statistic(f, y), 24).backward()
    assert abs(float(likelihood.log_variance.grad)) < 1e-12
    likelihood = Gaussian(float(2 * rms))
    likelihood.log_likelihood(likelihood.statistic(f, y), 24).backward()
    assert float(likelihood.log_variance.grad) < -1


def test_of_names_and_instances():
    likelihood = Gaussian(2.0)
    assert of(likelihood) is likelihood
    assert isinstance(of("categorical"), Categorical)
    assert isinstance(of("gaussian"), Gaussian)
    assert isinstance(of("bernoulli"), Bernoulli)
    assert isinstance(of("poisson"), Poisson)
    with pytest.raises(
        ValueError, match=r"unknown likelihood 'cauchy': use 'categorical' or .* or 'poisson', or one of your own"
    ):
        of("cauchy")
    with pytest.raises(TypeError, match=r"the likelihood is the class Gaussian: give an object, Gaussian\(\)"):
        of(Gaussian)
    with pytest.raises(TypeError, match="the likelihood is a Tensor: inputs and targets are one pair"):
        of(torch.zeros(3))


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.inf, math.nan])
def test_sigma_noise_must_be_positive(sigma):
    with pytest.raises(ValueError, match="sigma_noise must be positive and finite"):
        Gaussian(sigma)


@pytest.mark.fault(11)
@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.tensor([0, 1, 3]), "labels run from 0 to 3, but the model has 3 outputs.*0..2"),
        (
            torch.arange(7) % 5,
            "labels run from 0 to 4, but the model has 3 outputs, .*0..2: give the model 5 outputs, one for each class$",
        ),
        (torch.tensor([1, 2, 3]), "labels run from 1 to 3, .*: number them from 0, without gaps, or give the model 4 outputs"),
        (torch.tensor([-1, 0, 1]), "labels run from -1 to 1.*: number them from 0, without gaps$"),
        (torch.eye(3), "one-hot or probabilities.*argmax"),
        (torch.eye(3, dtype=torch.long), "one-hot or probabilities"),
        (
            torch.tensor([0.0, 1.0, 2.0]),
            r"targets of shape .* not class indices.*use targets\.long\(\).*'gaussian', with targets \(N, 1\)",
        ),
        (torch.tensor([[0], [1], [2]]), r"targets of shape .* not class indices.*use targets\.squeeze\(1\)$"),
        (torch.tensor([[[0.0]], [[1.0]]]), r"use targets\.flatten\(\)\.long\(\) if they are whole numbers"),
    ],
    ids=[
        "too large",
        "more classes",
        "from 1",
        "negative",
        "one-hot",
        "one-hot integers",
        "float",
        "column",
        "float maps of one",
    ],
)
def test_labels_that_are_no_labels(targets, message):
    with pytest.raises(ValueError, match=message):
        Categorical().check(3, targets)


@pytest.mark.fault(10)
@pytest.mark.parametrize(
    ("targets", "outputs", "message"),
    [
        (torch.zeros(3), 1, r"targets \(3,\).*outputs \(3, 1\): use targets\[:, None\]"),
        (torch.zeros(3, 1), 2, r"targets \(3, 1\).*outputs \(3, 2\)"),
        (torch.zeros(3, 2, dtype=torch.long), 2, "targets.float.*likelihood='categorical'"),
    ],
    ids=["(N,)", "columns", "integers"],
)
def test_targets_that_would_broadcast(targets, outputs, message):
    with pytest.raises(ValueError, match=message):
        Gaussian().check(outputs, targets)
