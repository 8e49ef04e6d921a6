"""Matrix-normal variational evidence, against torch.distributions, Monte Carlo and the exact evidence of linear models."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.testing import assert_close

from autosym import Gaussian
from autosym.evidence import exact, variational
from autosym.evidence.variational import MatrixNormal, Posterior
from autosym.linear.dense import Dense
from autosym.nn import nets
from models import mlp, randomised, regression
from oracles import regression_log_evidence


def drawn(blocks=2, rows=3, columns=4):
    part = MatrixNormal(torch.randn(blocks, rows, columns, dtype=torch.float64))
    for parameter in part.parameters():
        nn.init.normal_(parameter, std=0.4)
    return part


def dense(part, block):
    """The same distribution over the row-major vector of a block."""
    S, A = (L[block].detach() for L in part.factors())
    return MultivariateNormal(part.mean[block].detach().flatten(), torch.kron(S @ S.mT, A.mT @ A))


def linear(size=4, outputs=3):
    return randomised(nn.Sequential(Dense((size,), (outputs,))))


def kl_of(part, delta):
    d = part.mean.numel()
    square, entropy = part.expected_square(), part.entropy()
    return -entropy - 0.5 * (d * math.log(delta / (2 * math.pi)) - delta * square)


@pytest.mark.parametrize("delta", [0.3, 5.0])
def test_the_kl_is_that_of_torch(delta):
    part = drawn()
    prior = MultivariateNormal(torch.zeros(12, dtype=torch.float64), torch.eye(12, dtype=torch.float64) / delta)
    expected = sum(kl_divergence(dense(part, block), prior) for block in range(2))
    assert_close(kl_of(part, delta).detach(), expected)
    assert not torch.allclose(kl_of(part, 2 * delta).detach(), expected)


def test_the_kl_is_that_of_monte_carlo_and_of_the_posterior_of_a_model():
    model = linear()
    posterior = Posterior(model, std=0.3, precision=2.0).double()
    part = posterior.parts[0]
    nn.init.normal_(part.row, std=0.3)
    nn.init.normal_(part.column, std=0.3)
    assert_close(posterior.kl()[0], kl_of(part, 2.0))
    w = part.sample(40_000).detach().flatten(1)
    log_p = torch.distributions.Normal(0.0, 2.0**-0.5).log_prob(w).sum(1)
    ratio = dense(part, 0).log_prob(w) - log_p
    assert abs(float(ratio.mean() - posterior.kl()[0].detach())) < 4 * float(ratio.std()) / 200


def test_samples_have_the_covariance_of_the_factors():
    part = drawn(1, 2, 3)
    w = part.sample(100_000).detach().flatten(1)
    assert_close(torch.cov(w.mT), dense(part, 0).covariance_matrix, atol=0.1, rtol=0.05)


def exact_posterior(posterior, x, y, delta, variance):
    """Set q to the posterior of a linear model, which is matrix normal: kron(I, (X^T X / sigma^2 + delta I)^-1)."""
    part = posterior.parts[0]
    precision = torch.full((x.shape[1],), delta, dtype=x.dtype)
    mean, root = exact.posterior(x, y, precision, torch.tensor(variance, dtype=x.dtype))
    upper = torch.linalg.cholesky(torch.cholesky_inverse(root)).mT
    with torch.no_grad():
        part.mean.copy_(mean.mT[None])
        part.row.zero_()
        part.log_row.zero_()
        part.column.copy_(upper[None])
        part.log_column.copy_(upper.diagonal()[None].log())


def bound(posterior, x, y, variance):
    """The ELBO of a linear model with the expected squared error in closed form."""
    part = posterior.parts[0]
    S, A = (L[0] for L in part.factors())
    square = (y - x @ part.mean[0].mT).square().sum() + S.square().sum() * (x @ A.mT).square().sum()
    return posterior.evidence(Gaussian(math.sqrt(variance)).log_likelihood(square, y.numel()), len(x))


def test_the_bound_is_tight_for_the_right_posterior_and_below_for_any_other():
    (x, y), model = regression(15, 4, 3, math.sqrt(0.3)), linear()
    posterior = Posterior(model, precision=2.0).double()
    truth = regression_log_evidence(x, y, 2.0, math.sqrt(0.3))
    exact_posterior(posterior, x, y, 2.0, 0.3)
    record = bound(posterior, x, y, 0.3)
    assert float(record.log_evidence.detach()) == pytest.approx(truth, rel=1e-9)
    assert record.bound_of == "the evidence"
    for parameter in posterior.parts[0].parameters():
        kept = parameter.detach().clone()
        for size in (0.01, 0.1, 1.0):
            parameter.data = kept + size * torch.randn_like(kept)
            assert bound(posterior, x, y, 0.3).log_evidence.item() <= truth + 1e-9
        parameter.data = kept
    estimate = variational.at(model, (x, y), posterior, Gaussian(math.sqrt(0.3)), count=4000)
    assert estimate.log_evidence.item() == pytest.approx(truth, abs=0.5)


def test_learning_by_gradient_reaches_the_exact_evidence_and_moves_every_group():
    (x, y), model = regression(15, 4, 3, math.sqrt(0.3)), linear()
    posterior = Posterior(model, std=0.1, precision=2.0).double()
    before = {name: p.detach().clone() for name, p in posterior.named_parameters()}
    optimiser = torch.optim.Adam(posterior.parameters(), 0.05)
    for _ in range(600):
        optimiser.zero_grad()
        (-bound(posterior, x, y, 0.3).log_evidence).backward()
        optimiser.step()
    assert float(bound(posterior, x, y, 0.3).log_evidence.detach()) == pytest.approx(
        regression_log_evidence(x, y, 2.0, 0.3**0.5), abs=0.01
    )
    for name, p in posterior.named_parameters():
        if name.endswith(("mean", "log_row", "log_column", "column")):
            assert (p - before[name]).abs().max() > 1e-2, name


def test_every_parameter_of_q_gets_a_gradient_from_sampled_weights():
    model, x, y = mlp(3, 5, 2), torch.randn(8, 3).double(), torch.randn(8, 2).double()
    posterior = Posterior(model).double()
    before = {name: p.detach().clone() for name, p in posterior.named_parameters()}
    optimiser = torch.optim.Adam(posterior.parameters(), 0.01)
    (-variational.at(model, (x, y), posterior, "gaussian").log_evidence).backward()
    optimiser.step()
    still = [name for name, p in posterior.named_parameters() if torch.equal(p, before[name]) and p.numel() > 1]
    assert not still, "both factors of every path are learned"


def test_closed_form_updates_are_the_best():
    posterior = Posterior(linear(), std=0.2).double()
    posterior.update_precisions()
    best = posterior.kl().sum().item()
    for change in (-0.1, 0.1):
        posterior.log_precision += change
        assert posterior.kl().sum().item() > best
        posterior.log_precision -= change


def test_updates_are_moving_averages_of_variances():
    posterior = Posterior(linear(), precision=2.0).double()
    target = (posterior.sizes[0] / posterior.parts[0].expected_square()).item()
    posterior.update_precisions(0.25)
    assert (1 / posterior.log_precision.exp()).item() == pytest.approx(0.75 / 2 + 0.25 / target)


def test_a_network_for_images_has_a_bound():
    model = nets.build("f-fc+conv", (2, 4, 4), 3, 2, channels=(1, 2), strides=(1, 1), hidden=2)
    data = torch.randn(6, 2, 4, 4), torch.randint(3, (6,))
    record = variational.at(model, data, Posterior(model), count=2)
    assert math.isfinite(float(record.log_evidence.detach()))
    assert record.samples == 6
