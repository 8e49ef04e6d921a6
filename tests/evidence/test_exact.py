"""Exact evidence of linear models, against the density of the data."""

import math

import pytest
import torch

from autosym.evidence import exact


def problem(count=12, features=5, outputs=2):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    return draw(count, features), draw(count, outputs), draw(features).exp(), draw(()).exp()


def density(phi, y, delta, sigma2):
    covariance = phi @ torch.diag(1 / delta) @ phi.mT + sigma2 * torch.eye(len(phi), dtype=phi.dtype)
    normal = torch.distributions.MultivariateNormal(torch.zeros(len(phi), dtype=phi.dtype), covariance)
    return normal.log_prob(y.mT).sum()


@pytest.mark.parametrize("count", [3, 12])
def test_the_evidence_is_the_density_of_the_targets(count):
    phi, y, delta, sigma2 = problem(count)
    value = exact.at(phi, y, delta, sigma2).log_evidence
    assert float(value) == pytest.approx(float(density(phi, y, delta, sigma2)), rel=1e-12)
    assert float(value) != pytest.approx(float(density(phi, y, delta, 2 * sigma2)), rel=1e-3)


def test_one_output_may_come_without_an_axis_and_one_precision_serves_all():
    phi, y, *_ = problem()
    record = exact.at(phi, y[:, 0], 2.0, 0.3)
    expected = density(phi, y[:, :1], torch.full((5,), 2.0, dtype=phi.dtype), torch.tensor(0.3, dtype=phi.dtype))
    assert float(record.log_evidence) == pytest.approx(float(expected), rel=1e-12)
    assert record.samples == 12
    assert record.bound_of is None


def test_it_is_differentiable_in_features_precision_and_noise():
    phi, y, delta, sigma2 = (t.requires_grad_() for t in problem())
    torch.autograd.gradcheck(lambda *given: exact.at(*given).log_evidence, (phi, y, delta, sigma2))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"features": torch.ones(4, 2, 1)}, "features must be"),
        ({"targets": torch.ones(3, 2)}, "features must be"),
        ({"precision": 0.0}, "must be positive"),
        ({"variance": -1.0}, "must be positive"),
        ({"precision": math.nan}, "must be positive"),
    ],
)
def test_what_is_no_linear_model_is_refused(change, match):
    given = {"features": torch.ones(4, 2), "targets": torch.ones(4, 1), **change}
    with pytest.raises(ValueError, match=match):
        exact.at(**given)
