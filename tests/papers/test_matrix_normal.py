"""Local noise, equal modes and the closed form of the noise, of a matrix normal posterior."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from autosym import Gaussian
from autosym.evidence import variational
from autosym.evidence.variational import Posterior
from autosym.linear.dense import Dense
from autosym.nn import layers
from autosym.papers import matrix_normal
from models import mlp, randomised


def test_local_sampling_has_the_distribution_of_sampled_weights():
    model = randomised(nn.Sequential(Dense((3,), (2,))))
    posterior = Posterior(model, std=0.3).double()
    nn.init.normal_(posterior.parts[0].row, std=0.3)
    x = torch.randn(1, 3, dtype=torch.float64)
    with matrix_normal.local(posterior, model) as means, torch.no_grad():
        local = torch.func.functional_call(model, means, (x.expand(50_000, 3),))
    weights = posterior.sample(50_000)
    sampled = torch.func.vmap(lambda w: torch.func.functional_call(model, w, (x,)))(weights)[:, 0].detach()
    assert_close(torch.cov(local.mT), torch.cov(sampled.mT), atol=0.02, rtol=0.05)
    assert_close(model(x), x @ model[0].weight[0].mT, msg="the hooks are gone")


def test_local_sampling_refuses_shared_positions_and_foreign_layers():
    conv = nn.Sequential(layers.conv((2, 4, 4), (3, 4, 4)))
    posterior = Posterior(conv)
    with matrix_normal.local(posterior, conv) as means, pytest.raises(ValueError, match="16 shared positions"):
        torch.func.functional_call(conv, means, (torch.randn(1, 2, 4, 4),))
    foreign = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="autosym's paths"), matrix_normal.local(Posterior(foreign), foreign):
        pass


def test_equal_modes_add_the_number_of_permutations():
    model, data = mlp(3, 5, 2), (torch.randn(8, 3).double(), torch.randn(8, 2).double())
    one = variational.at(model, data, Posterior(model).double(), "gaussian")
    all_of_them = matrix_normal.with_permutations(one, (5, 3))
    assert float((all_of_them.log_evidence - one.log_evidence).detach()) == pytest.approx(math.log(120) + math.log(6))
    assert one.bound_of == "the evidence"
    assert all_of_them.bound_of == "the evidence, if modes that differ by permutations do not overlap"


@torch.no_grad()
def test_the_closed_form_of_the_noise_is_the_best_and_a_moving_average():
    likelihood = Gaussian(1.0)
    matrix_normal.update_variance(likelihood, 0.25)
    assert float(likelihood.log_variance.exp()) == pytest.approx(0.25)
    best = float(likelihood.log_likelihood(torch.tensor(0.25 * 40), 40))
    for change in (-0.1, 0.1):
        likelihood.log_variance.data += change
        assert float(likelihood.log_likelihood(torch.tensor(0.25 * 40), 40)) < best
        likelihood.log_variance.data -= change
    matrix_normal.update_variance(likelihood, 1.25, 0.1)
    assert float(likelihood.log_variance.exp()) == pytest.approx(0.35)
