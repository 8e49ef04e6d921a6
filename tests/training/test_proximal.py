"""Weight steps on one flat vector against a slow loop over parameters, written from the formulas."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from autosym import Categorical, Gaussian, Prior
from autosym.curvature.owners import sites, sizes
from autosym.nn import layers
from autosym.training.steps import Weights
from models import OPTIMISERS, draw, mlp, randomised

RATES = (0.3, 0.02, 0.11, 0.005, 0.2)


class Loop:
    """Proximal Adam or SGD, one parameter after another.

    m and v are running means of g and g^2, and M is 1, or the root of v without its bias, at least a hundredth of its own mean.
    Then w <- (w - lr m / M) / (1 + lr delta tau sigma^2 / (N M)), with m without its bias (Adam), or summed up (SGD).
    Of Adam, m / M has a root mean square of at most 1. Relative rates
    of Adam are in units of the root mean square of the initial weights, or of 0.1 where all are zero.
    """

    def __init__(self, parameters, count, optimiser, momentum, clip, relative):
        self.parameters, self.count, self.optimiser, self.momentum, self.clip = parameters, count, optimiser, momentum, clip
        relative = relative and optimiser == "adam"
        self.sizes = {name: float(p.detach().square().mean()) ** 0.5 if relative else 1.0 for name, p in parameters.items()}
        self.m, self.v = ({name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(2))
        self.steps, self.floored, self.clipped = 0, 0, 0

    def step(self, model, likelihood, x, y, prior, rate):
        loss = likelihood.loss(model(x), y)
        gradients = torch.autograd.grad(loss / len(x), list(self.parameters.values()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        self.steps += 1
        for (name, w), g in zip(self.parameters.items(), gradients, strict=True):
            if norm > self.clip:
                g = g * self.clip / norm
            lr, scales = rate * (self.sizes[name] or 0.1), prior.scales.get(name)
            tau = 1 if scales is None else scales.flatten().repeat_interleave(w.numel() // scales.numel()).view(w.shape)
            kappa = prior.precision()[name] * tau / (float(likelihood.scale().detach()) * self.count)
            self.m[name] = self.momentum * self.m[name] + (1 - self.momentum) * g
            self.v[name] = 0.999 * self.v[name] + 0.001 * g**2
            if self.optimiser == "sgd":
                metric, m = torch.ones_like(w), self.m[name] / (1 - self.momentum)
                lr_prior = lr / (1 - self.momentum)
            else:
                metric = (self.v[name] / (1 - 0.999**self.steps)).sqrt()
                least = 0.01 * metric.mean() + 1e-8
                self.floored += int((metric < least).sum())
                metric, m, lr_prior = metric.clamp_min(least), self.m[name] / (1 - self.momentum**self.steps), lr
            step = m / metric
            if self.optimiser == "adam" and (size := float(step.square().mean()) ** 0.5) > 1:
                step, self.clipped = step / size, self.clipped + 1
            w.data = (w.data - lr * step) / (1 + lr_prior * kappa / metric)
        return float(loss.detach())


def mixed():
    """Weights of one, two and three axes in blocks, from a map to three outputs."""
    return randomised(
        nn.Sequential(
            layers.Relaxed(
                {"conv": layers.conv((2, 4, 4), (2, 4, 4))}, {"f-fc": layers.Factored((2, 4, 4), (2, 4, 4))}, stride=1
            ),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(32, 3),
        )
    )


def of_sites(model):
    return {site.name: site.parameter for site in sites(model)}


def compared(model, data, likelihood, prior, optimiser, momentum=0.9, clip=math.inf, count=40, relative=False):
    """Both forms for a few steps on parts of the data, at other rates and other priors."""
    (x, y), other = data, copy.deepcopy(model)
    weights = Weights(of_sites(model), count, optimiser, momentum, clip, sizes(sites(model)) if relative else None)
    loop = Loop(of_sites(other), count, optimiser, momentum, clip, relative)
    total = 0.0
    for index, lr in enumerate(RATES):
        prior.log_precision.data += 0.3 * index
        weights.set_prior(prior, likelihood)
        weights.lr.fill_(lr)
        rows = slice(index, index + 5)
        weights.step(model, likelihood, x[rows], y[rows])
        total += loop.step(other, likelihood, x[rows], y[rows], prior, lr)
        for (name, ours), theirs in zip(of_sites(model).items(), of_sites(other).values(), strict=True):
            assert_close(ours.detach(), theirs.detach(), rtol=1e-11, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}")
    assert weights.take_loss() == pytest.approx(total, rel=1e-12)
    assert weights.take_loss() == 0
    for kept, expected in ((weights.first, loop.m), *([(weights.second, loop.v)] if optimiser == "adam" else [])):
        assert kept.keys() == expected.keys()
        for name in kept:
            assert_close(kept[name], expected[name], rtol=1e-11, atol=1e-14)
    assert float(weights.steps) == len(RATES)
    return loop


def prior_of(model, nu=math.inf):
    names = list(of_sites(model))
    return Prior(names, {name: 0.5 * (i + 1) for i, name in enumerate(names)}, nu)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.6)], ids=["categorical", "gaussian"])
def test_a_flat_step_is_the_loop_over_parameters(likelihood, momentum, optimiser):
    model, data = mixed(), draw(likelihood.name, 10, (2, 4, 4))
    compared(model, data, likelihood, prior_of(model), optimiser, momentum)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("clip", [1e-3, 0.5, 1e6])
def test_the_norm_that_is_clipped_is_that_of_all_parameters(clip, optimiser):
    model, data = mixed(), draw("categorical", 10, (2, 4, 4))
    compared(model, data, Categorical(), prior_of(model), optimiser, clip=clip)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_rates_may_be_relative_to_the_initial_weights(optimiser):
    """Of each path, also of one that begins at zero; they stay as they were when weights have grown."""
    model, data = mixed(), draw("categorical", 10, (2, 4, 4))
    nn.init.zeros_(model[3].bias)
    model[3].weight.data *= 7
    compared(model, data, Categorical(), prior_of(model), optimiser, relative=True)


def test_a_gradient_of_zero_is_not_clipped_to_nan():
    model, (x, _) = mlp(5, 4, 3), draw("gaussian", 4)
    weights = Weights(of_sites(model), 4, "adam", clip=0.1)
    weights.set_prior(prior_of(model), Gaussian())
    weights.lr.fill_(0.1)
    weights.step(model, Gaussian(), x, model(x).detach())
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_the_scales_of_a_student_t_prior_are_of_rows(optimiser):
    model, data = mixed(), draw("categorical", 10, (2, 4, 4))
    prior = prior_of(model, nu=4.0)
    for name, parameter in of_sites(model).items():
        if not name.endswith("b_1"):  # a path without scales yet has scale one
            rows = parameter.shape[:2] if parameter.dim() == 3 else (1, len(parameter))  # of ours, of torch's
            prior.scales[name] = 0.1 + 5 * torch.rand(rows, dtype=torch.float64)
    assert {tuple(scales.shape) for scales in prior.scales.values()} >= {(2, 2), (2, 16), (1, 2), (1, 3)}
    compared(model, data, Categorical(), prior, optimiser)


def test_the_metric_is_kept_above_a_hundredth_of_its_mean_over_the_path():
    """Of its own path: the gradients of one are many times larger than of the other."""
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 10)
    x[:, 1] *= 1e-6
    x[:, 2] = 0
    model[2].weight.data *= 1e-3
    loop = compared(model, (x, y), Categorical(), prior_of(model), "adam")
    assert loop.floored >= 4 * 2 * len(RATES), "the two features that say nothing"


def test_a_metric_of_zero_stays_above_zero():
    """A path whose gradient vanishes: only its prior moves it."""
    model, (x, y) = nn.Linear(5, 3, bias=False).double(), draw("categorical", 10)
    compared(model, (0 * x, y), Categorical(), prior_of(model), "adam")


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_everything_a_step_writes_stays_where_it_is(dtype, optimiser):
    """As a CUDA graph needs it."""
    model, (x, y) = mlp(5, 4, 3).to(dtype), draw("categorical", 10)
    weights = Weights(of_sites(model), 10, optimiser, clip=1.0)

    def places():
        tensors = [*model.parameters(), *weights.first.values(), *weights.second.values()]
        return [t.data_ptr() for t in (*tensors, weights._delta, weights.loss, weights.lr, weights.steps)]

    before = places()
    for _ in range(3):
        weights.set_prior(prior_of(model), Categorical())
        weights.lr.fill_(0.1)
        weights.step(model, Categorical(), x.to(dtype), y)
        weights.take_loss()
    assert places() == before
    assert all(p.dtype == dtype and p.grad is None and p.requires_grad for p in model.parameters())
    assert weights.loss.dtype == weights.steps.dtype == torch.float64


def test_the_loss_is_summed_over_samples_until_it_is_taken():
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 12)
    weights = Weights(of_sites(model), 12, "sgd")
    weights.set_prior(prior_of(model), Categorical())
    expected = float(nn.functional.cross_entropy(model(x), y, reduction="sum").detach())
    for part in (slice(0, 5), slice(5, 12)):  # at a rate of zero
        weights.step(model, Categorical(), x[part], y[part])
    assert weights.take_loss() == pytest.approx(expected, rel=1e-12)
    assert weights.take_loss() == 0
    weights.step(model, Categorical(), x, y)
    assert weights.take_loss() == pytest.approx(expected, rel=1e-12)


def test_a_prior_is_taken_when_it_is_set():
    """Steps between two evidence steps see the precisions of the last one."""
    (x, y), start, moved = draw("categorical", 12), mlp(5, 3), []
    for later, again in ((0.0, False), (2.0, False), (2.0, True)):
        model = copy.deepcopy(start)
        weights, prior = Weights(of_sites(model), 12, "adam"), prior_of(model)
        weights.set_prior(prior, Categorical())
        prior.log_precision.data += later
        if again:
            weights.set_prior(prior, Categorical())
        weights.lr.fill_(0.1)
        weights.step(model, Categorical(), x, y)
        moved.append(model[0].weight.detach())
    assert torch.equal(moved[0], moved[1])
    assert not torch.equal(moved[0], moved[2])
