"""How much of the targets a network explains: compared with guesses that know no input."""

import math

import pytest
import torch

from autosym.answer.guessing import entropy, explained
from autosym.bayes import likelihoods


def of(targets, name):
    return explained(targets, likelihoods.of(name), name == "categorical")


def test_classes_are_guessed_by_how_frequent_they_are():
    y = torch.tensor([0] * 90 + [1] * 10)
    assert entropy(y) == pytest.approx(0.325, abs=0.001)
    part = of(y, "categorical")
    assert part(-100 * entropy(y)) == pytest.approx(0.0)  # uniform guessing has -69
    assert part(-50 * entropy(y)) == pytest.approx(0.5)
    assert part(-1e9) < -1e6
    assert of(torch.zeros(100, dtype=torch.int64), "categorical")(-1.0) == 0.0, "one class: nothing to explain"


def test_numbers_are_guessed_by_their_mean_and_variance():
    """The log likelihood of the best constant explains nothing, that of a line with a tenth of the variance left nine tenths."""
    torch.manual_seed(0)
    x = torch.randn(400, 2, dtype=torch.float64)
    noise = torch.randn(400, 2, dtype=torch.float64)
    y = 5.0 + 3 * x + noise
    part = of(y, "gaussian")

    def best(residuals):
        variance = residuals.square().mean()
        return float(torch.distributions.Normal(0.0, variance.sqrt()).log_prob(residuals).sum())

    assert part(best(y - y.mean(0))) == pytest.approx(0.0, abs=1e-9)
    left = float(noise.square().sum() / (y - y.mean(0)).square().sum())
    assert part(best(noise)) == pytest.approx(1 - left, abs=1e-9)
    assert part(-1e9) < -1e6
    assert math.isfinite(part(-1e9))
    assert of(torch.ones(10, 1), "gaussian")(-3.0) == 1.0, "there is nothing to explain, and no unit"


def test_targets_of_other_likelihoods_have_no_guess():
    assert of(torch.arange(10)[:, None], "poisson")(-1e9) == 1.0
