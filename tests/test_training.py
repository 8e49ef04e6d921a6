import copy
import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, TensorDataset

import autosym
import oracles
from autosym import Gaussian, Prior, Schedule, nets
from autosym.evidence import laplace
from autosym.evidence.laplace import LOG_PRECISION_RANGE
from test_curvature import draw, mlp

OPTIMISERS = ("adam", "sgd")


def eye(size):
    return torch.eye(size, dtype=torch.float64)


def regression(samples=40, size=5, outputs=2, noise=0.5):
    """Features, and targets that are linear in them up to noise."""
    x = torch.randn(samples, size, dtype=torch.float64)
    return x, x @ torch.randn(size, outputs).double() + noise * torch.randn(samples, outputs)


def linear(size=5, outputs=2):
    return nn.Linear(size, outputs, bias=False).double()


def small(name="f-fc+conv", classes=3):
    return nets.build(name, (2, 4, 4), classes, 2, channels=(1, 2), strides=(1, 2), hidden=2)


def images(likelihood="categorical", samples=24):
    x, y = draw(likelihood, samples, (2, 4, 4))
    return x.float(), y if likelihood == "categorical" else y.float()


# ---- weight steps: the fixed point is the MAP


def at_map(model, data, likelihood, precision, optimiser, epochs=500, lr=0.1):
    options = {"optimiser": optimiser, "lr": lr if optimiser == "sgd" else 0.05, "batch_size": len(data[0])}
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


def test_the_map_is_where_adam_stays():
    """Per weight, the likelihood's step and the prior's cancel exactly, also before Adam's moments have settled."""
    (x, y), model = regression(), linear()
    ridge = torch.linalg.solve(x.T @ x + 3 * eye(5), x.T @ y).T.contiguous()
    model.weight.data = ridge.clone()
    at_map(model, (x, y), Gaussian(), 3.0, "adam", epochs=20)
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
@pytest.mark.parametrize("start", [0.01, 1.0])
def test_evidence_steps_find_the_maximum_of_the_closed_form(step, options, tolerance, start):
    (x, y), model = regression(noise=0.3), linear()
    delta, variance, value = best_evidence(x, y)
    schedule = Schedule(epochs=400, batch_size=40, optimiser="sgd", lr=0.1, step=step, sampled=False, **options)
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


# ---- planted symmetry


def gratings(samples):
    """Waves of twelve directions and lengths with a random phase and a little noise: (samples, 1, 8, 8)."""
    waves = [(1, 0), (0, 1), (1, 1), (1, -1), (2, 0), (0, 2), (2, 1), (1, 2), (2, -1), (1, -2), (2, 2), (2, -2)]
    rows, columns = torch.tensor(waves)[torch.randint(12, (samples,))].float()[:, :, None, None].unbind(1)
    position, phase = torch.arange(8.0), 2 * math.pi * torch.rand(samples, 1, 1)
    x = torch.cos(math.pi / 4 * (rows * position[:, None] + columns * position) + phase)[:, None]
    x = x + 0.1 * torch.randn_like(x)
    return x / x.std()


def planted(name, seed, samples=900, classes=3):
    """Images that a random teacher of the named paths is surest of, the same number of each class, with its answers."""
    torch.manual_seed(seed)
    teacher, x = student(name, classes), gratings(30 * samples)
    with torch.no_grad():
        logits = teacher(x)
    logits = (logits - logits.mean(0)) / logits.std(0)
    margin = torch.stack([logits[:, c] - logits[:, torch.arange(classes) != c].amax(1) for c in range(classes)], 1)
    chosen = margin.argsort(0, descending=True)[: samples // classes]
    return x[chosen.T.flatten()], torch.arange(classes).repeat_interleave(samples // classes)


def student(name="f-fc+conv", classes=3):
    return nets.build(name, (1, 8, 8), classes, 8, channels=(1, 1), strides=(2, 2), hidden=2)


PLANTED = Schedule(epochs=50, batch_size=50, lr=0.02, burn_in=5, every=1, trust=2.0)


def learned(teacher, seed, **options):
    """The free share of every layer of a student of f-fc+conv, which has learned its task."""
    data = planted(teacher, seed)
    torch.manual_seed(100 + seed)
    model = student()
    fit = autosym.fit(model, data, schedule=replace(PLANTED, **options), seed=seed)
    assert accuracy(model, data) > 0.95
    return fit.symmetry().free_share()


def accuracy(model, data):
    with torch.no_grad():
        return float((model(data[0]).argmax(1) == data[1]).float().mean())


# Measured, free share of the two layers in per cent at seeds 0, 1, 2: convolutional teacher 0.0 0.0, 0.0 0.0, 0.0 0.0 (below
# 0.4 at seeds 0 to 9 but for 5 and 7, which stay at 25 11 and 49 6); dense teacher 73 6, 100 52, 93 0.3; plain MAP on the
# convolutional teacher 8.6 3.0, 14 4.5, 14 9.0. Every student is right on more than 95 % of its training images.
SEEDS = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.parametrize("seed", SEEDS)
def test_evidence_finds_the_symmetry_of_a_convolutional_teacher(seed):
    assert max(learned("conv", seed).values()) < 0.05


@pytest.mark.parametrize("seed", SEEDS)
def test_evidence_finds_no_symmetry_in_a_dense_teacher(seed):
    assert max(learned("fc", seed).values()) > 0.3


@pytest.mark.parametrize("seed", SEEDS)
def test_the_training_loss_does_not_find_the_symmetry(seed):
    assert max(learned("conv", seed, step="none").values()) > 0.05


@pytest.mark.parametrize("precision", [1e-3, 1.0, 1e3, 1e6], ids="{:g}".format)
def test_no_collapse_at_any_starting_precision(precision):
    data, model = planted("conv", 0, samples=300), student()
    fit = autosym.fit(model, data, prior_precision=precision, epochs=20, lr=0.02, burn_in=4, every=1)
    assert accuracy(model, data) > 0.9, "chance is a third"
    assert all(math.isfinite(line["loss"]) for line in fit.history)


def test_plain_map_collapses_at_a_huge_precision():
    """The control of the test above: without evidence the prior is obeyed."""
    data, model = planted("conv", 0, samples=300), student()
    autosym.fit(model, data, prior_precision=1e6, epochs=10, lr=0.02, step="none")
    assert accuracy(model, data) < 0.5


# ---- what a step touches


@pytest.mark.parametrize("step", ["mackay", "gradient"])
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_a_step_changes_every_parameter_and_every_precision(likelihood, step):
    model, data = small(), images(likelihood)
    before = copy.deepcopy(model.state_dict())
    kind = Gaussian(0.7) if likelihood == "gaussian" else autosym.Categorical()
    fit = autosym.fit(model, data, kind, epochs=1, burn_in=0, every=1, step=step)
    assert not [name for name, value in model.state_dict().items() if torch.equal(value, before[name])]
    assert len(fit.prior.names) == len(before) == 16
    assert not [name for name, value in fit.prior.precision().items() if value == 1]
    if likelihood == "gaussian":
        sigma = math.exp(float(fit.likelihood.log_variance.detach()) / 2)
        assert sigma != pytest.approx(0.7, abs=1e-3)
        assert fit.history[0]["sigma_noise"] == pytest.approx(sigma)
        assert math.exp(float(kind.log_variance.detach()) / 2) == pytest.approx(0.7), "the one given is left as it was"


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_map_leaves_precisions_and_noise_alone(likelihood):
    model, data = small(), images(likelihood)
    kind = Gaussian(0.7) if likelihood == "gaussian" else likelihood
    precision = {site: 3.0 + i for i, site in enumerate(laplace.at(model, data, likelihood).names)}
    fit = autosym.fit(model, data, kind, prior_precision=precision, epochs=2, step="none")
    assert fit.prior.precision() == pytest.approx(precision, rel=1e-12)
    if likelihood == "gaussian":
        assert float(fit.likelihood.log_variance.detach()) == pytest.approx(2 * math.log(0.7))
    assert [set(line) for line in fit.history] == [{"epoch", "loss", "seconds"}] * 2


def test_frozen_parameters_stay():
    model, data = small(), images()
    model.hidden.requires_grad_(False)
    before = model.hidden.linear.weight.detach().clone()
    fit = autosym.fit(model, data, epochs=2, burn_in=0, every=1)
    assert torch.equal(model.hidden.linear.weight, before)
    assert not any(name.startswith("hidden") for name in fit.prior.names)


# ---- repeatable


def one_run(seed, step="mackay"):
    torch.manual_seed(5)
    model, data = small(), images()
    fit = autosym.fit(model, data, seed=seed, epochs=4, batch_size=8, burn_in=1, every=1, step=step)
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in fit.history]
    return torch.cat([p.detach().flatten() for p in model.parameters()]), fit.prior.precision(), lines


@pytest.mark.parametrize("step", ["mackay", "gradient", "none"])
def test_a_seed_fixes_the_run_bit_for_bit(step):
    weights, precision, lines = one_run(3, step)
    torch.manual_seed(77)
    again = one_run(3, step)
    assert torch.equal(weights, again[0])
    assert (precision, lines) == again[1:]


def test_another_seed_is_another_run():
    weights, precision, lines = one_run(3)
    other = one_run(4)
    assert not torch.equal(weights, other[0])
    assert precision != other[1]
    assert lines != other[2]


# ---- data


class Squares(Dataset):
    """A dataset that is no tensor."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


DATA = {
    "tensors": lambda x, y: (x, y),
    "tensor dataset": TensorDataset,
    "dataset": Squares,
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), 24),
    "shuffled loader": lambda x, y: DataLoader(TensorDataset(x, y), 24, shuffle=True),
    "list of batches": lambda x, y: [(x, y)],
}


@pytest.mark.parametrize("kind", DATA)
def test_any_data_give_the_same_fit(kind):
    """Of the whole data in one batch the order does not matter."""
    (x, y), start = draw("categorical", 24), mlp(5, 4, 3)
    fits = []
    for data in ((x, y), DATA[kind](x, y)):
        model = copy.deepcopy(start)
        fits.append(autosym.fit(model, data, epochs=6, batch_size=24, lr=0.05, burn_in=1, every=1, sampled=False))
        assert fits[-1].history[-1]["loss"] < fits[-1].history[0]["loss"] - 0.05
        assert fits[-1].evidence.samples == 24
    for ours, theirs in zip(fits[0].model.parameters(), fits[1].model.parameters(), strict=True):
        assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    assert fits[1].prior.precision() == pytest.approx(fits[0].prior.precision(), rel=1e-8)
    assert [line["loss"] for line in fits[1].history] == pytest.approx([line["loss"] for line in fits[0].history])


def test_batches_are_shuffled_and_all_are_seen():
    """Batches of 8 and of 4 are those of the weights: the evidence takes all 20 at once."""
    (x, y), model, seen = draw("categorical", 20), mlp(5, 4, 3), []
    x[:, 0] = torch.arange(20)
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][:, 0].int().tolist()))
    autosym.fit(model, (x, y), epochs=2, batch_size=8, step="none")
    a, b, c, d, e, f = (batch for batch in seen if len(batch) in (8, 4))
    assert [len(batch) for batch in (a, b, c)] == [8, 8, 4]
    assert sorted(a + b + c) == sorted(d + e + f) == list(range(20))
    assert a + b + c != d + e + f
    assert a + b + c != list(range(20))


def test_the_loss_is_the_mean_over_samples():
    (x, y), model = draw("categorical", 20), mlp(5, 4, 3)
    before = float(F.cross_entropy(model(x), y).detach())
    fit = autosym.fit(model, (x, y), epochs=1, batch_size=8, lr=1e-12, step="none")
    assert fit.history[0]["loss"] == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("step", ["mackay", "none"])
def test_evidence_is_taken_on_its_own_data_where_they_are_given(step):
    """As where the training data are augmented."""
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 20)
    augmented = (x + 0.3 * torch.randn_like(x), y)
    fit = autosym.fit(model, augmented, evidence_data=(x, y), epochs=2, burn_in=0, every=1, step=step)
    exact, other = (autosym.log_evidence(model, d, prior_precision=fit.prior.precision()) for d in ((x, y), augmented))
    assert float(fit.evidence.log_evidence) == pytest.approx(exact, abs=1e-9)
    assert abs(exact - other) > 1e-3


def test_evidence_of_another_number_of_samples_is_refused():
    refused(
        "evidence_data holds 13 samples, data 20", mlp(5, 4, 3), draw("categorical", 20), evidence_data=draw("categorical", 13)
    )


def test_a_loader_that_drops_samples_may_train_where_the_evidence_has_all():
    x, y = draw("categorical", 20)
    loader = DataLoader(TensorDataset(x, y), 8, drop_last=True, shuffle=True)
    fit = autosym.fit(mlp(5, 4, 3), loader, evidence_data=(x, y), epochs=2, burn_in=0, every=1)
    assert fit.evidence.samples == 20


def test_the_subset_is_used(monkeypatch):
    seen, real = [], laplace.kfac
    monkeypatch.setattr(laplace, "kfac", lambda *a, **k: seen.append((k.get("subset"), k.get("seed"))) or real(*a, **k))
    autosym.fit(mlp(5, 4, 3), draw("categorical", 20), epochs=2, burn_in=0, every=1, subset=7, seed=10)
    assert [call for call in seen if call[0]] == [(7, 11), (7, 12)], "with other draws at every step"


# ---- history


@pytest.mark.parametrize(
    ("burn_in", "every", "expected"),
    [(0, 1, [1, 2, 3, 4, 5, 6]), (0, 2, [2, 4, 6]), (2, 1, [3, 4, 5, 6]), (1, 2, [3, 5]), (3, 2, [5]), (5, 1, [6])],
)
def test_evidence_steps_follow_burn_in_and_frequency(burn_in, every, expected):
    fit = autosym.fit(mlp(5, 4, 3), draw("categorical", 12), epochs=6, burn_in=burn_in, every=every, settle=0.0)
    assert [line["epoch"] for line in fit.history] == list(range(1, 7))
    assert [line["epoch"] for line in fit.history if "log_evidence" in line] == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, range(12, 81, 2)),
        ({"settle": 0.5}, range(12, 51, 2)),
        ({"settle": 0.5, "burn_in": 0, "every": 1}, range(1, 51)),
        ({"settle": 0.9, "burn_in": 40}, [42]),
        ({"step": "none"}, []),
    ],
    ids=["default", "half", "half, every epoch", "at least one", "map"],
)
def test_precisions_settle_at_the_end(options, expected):
    assert list(Schedule(**options).evidence_epochs()) == list(expected)


def test_a_short_run_has_an_evidence_step():
    fit = autosym.fit(mlp(5, 4, 3), draw("categorical", 12), epochs=1)
    assert "log_evidence" in fit.history[0]


def test_a_burn_in_as_long_as_the_run_is_refused():
    refused("burn_in", mlp(5, 4, 3), draw("categorical", 12), epochs=3, burn_in=3)


def test_a_line_says_what_the_step_did():
    fit = autosym.fit(small(), images("gaussian"), "gaussian", epochs=2, burn_in=0, every=1)
    keys = {"epoch", "loss", "log_evidence", "log_likelihood", "occam", "precision", "free_share", "sigma_noise", "seconds"}
    for line in fit.history:
        assert set(line) == keys
        assert line["log_evidence"] == pytest.approx(line["log_likelihood"] + line["occam"])
        assert set(line["free_share"]) == {"blocks.0", "blocks.1"}
        assert tuple(line["precision"]) == fit.prior.names
    assert fit.history[-1]["precision"] == pytest.approx(fit.prior.precision())
    assert fit.history[0]["seconds"] <= fit.history[1]["seconds"]


def test_history_is_written_as_json_lines_and_logged(tmp_path):
    logged = []
    path = tmp_path / "deep" / "history.jsonl"
    data = draw("categorical", 12)
    fit = autosym.fit(mlp(5, 4, 3), data, epochs=3, burn_in=1, every=1, history=path, log=logged.append)
    assert [json.loads(line) for line in path.read_text().splitlines()] == fit.history
    assert logged == fit.history
    assert len(logged) == 3


def test_history_is_strict_json_where_a_share_is_not_known(tmp_path):
    """NaN is no JSON; of a frozen path the evidence says nothing."""
    model, path = small(), tmp_path / "history.jsonl"
    model.blocks[0]["f-fc"].requires_grad_(False)
    fit = autosym.fit(model, images(), epochs=2, burn_in=0, every=1, history=path, progress=True)

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines == fit.history
    assert 0 < lines[-1]["free_share"]["blocks.1"] < 1


def test_history_is_on_disk_while_the_run_goes_on(tmp_path):
    path, counts = tmp_path / "history.jsonl", []
    log = lambda line: counts.append(len(path.read_text().splitlines()))  # noqa: E731
    autosym.fit(mlp(5, 4, 3), draw("categorical", 12), epochs=3, history=path, log=log)
    assert counts == [1, 2, 3]


def test_progress_shows_loss_evidence_and_shares(capsys):
    pytest.importorskip("rich")
    autosym.fit(small(), images(), epochs=2, burn_in=0, every=1, progress=True)
    shown = " ".join(capsys.readouterr().out.split())
    assert "2/2" in shown
    for word in ("loss", "evidence"):
        assert word in shown
    autosym.fit(small(), images(), epochs=1, step="none")
    assert capsys.readouterr().out == ""


def test_a_schedule_may_be_given_and_changed():
    schedule = Schedule(epochs=3, step="none")
    fit = autosym.fit(mlp(5, 4, 3), draw("categorical", 12), schedule=schedule, lr=0.03)
    assert fit.schedule == Schedule(epochs=3, step="none", lr=0.03)
    assert schedule.lr == Schedule().lr
    assert len(fit.history) == 3


def test_precisions_start_no_higher_than_the_cap():
    """With steps too small to see. MAP obeys the precision it is given."""
    data, still = draw("categorical", 12), {"epochs": 2, "start_cap": 2.0, "trust": 1e-9}
    for given, step, expected in ((1e4, "mackay", 2.0), (0.3, "mackay", 0.3), (1e4, "none", 1e4)):
        fit = autosym.fit(mlp(5, 4, 3), data, prior_precision=given, step=step, **still)
        assert list(fit.prior.precision().values()) == pytest.approx([expected] * 4, rel=1e-6)


# ---- faults


def refused(message, model, data, likelihood="categorical", error=ValueError, **options):
    with pytest.raises(error, match=message):
        autosym.fit(model, data, likelihood, **{"epochs": 2, **options})


@pytest.mark.fault(1)
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("step", ["mackay", "none"])
def test_a_bad_input_is_named_and_the_weights_are_kept(step, value):
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 12)
    x[7, 2] = value
    refused("inputs .*not finite", model, (x, y), step=step, batch_size=4)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.fault(1)
def test_a_bad_target_is_named():
    x, y = draw("gaussian", 12)
    y[3, 1] = math.nan
    refused("targets .*not finite", mlp(5, 4, 3), (x, y), "gaussian")


@pytest.mark.fault(4)
def test_a_bad_weight_is_named():
    model = mlp(5, 4, 3)
    model[0].weight.data[1, 1] = math.nan
    refused("0.weight holds values that are not finite", model, draw("categorical", 12))


@pytest.mark.fault(5)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_model_in_half_precision(dtype):
    model, (x, y) = mlp(5, 4, 3).to(dtype), draw("categorical", 12)
    refused(rf"0.weight is {dtype}.*use model.float\(\)", model, (x.to(dtype), y))


@pytest.mark.fault(6)
def test_a_loader_that_drops_samples_is_refused_before_the_training():
    lines, loader = [], DataLoader(TensorDataset(*draw("categorical", 20)), 8, drop_last=True)
    refused("drop_last=True", mlp(5, 4, 3), loader, log=lines.append)
    assert not lines, "no work is lost"


@pytest.mark.fault(7)
@pytest.mark.parametrize("data", [[], (torch.zeros(0, 5), torch.zeros(0, dtype=torch.long))], ids=["list", "tensors"])
def test_empty_data(data):
    refused("the data are empty", mlp(5, 4, 3), data)


def test_a_generator_is_refused_as_it_can_be_read_once_only():
    x, y = draw("categorical", 12)
    refused("read only once", mlp(5, 4, 3), ((x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)))


@pytest.mark.fault(13)
@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4, affine=False), nn.Dropout(0.5)], ids=lambda layer: type(layer).__name__)
def test_what_the_evidence_cannot_take_is_refused_before_the_training(layer):
    lines, model = [], nn.Sequential(nn.Linear(5, 4), layer, nn.Linear(4, 3)).double()
    refused(rf"1 \({type(layer).__name__}\).*model.eval\(\)", model, draw("categorical", 12), log=lines.append)
    assert not lines, "no work is lost"
    autosym.fit(model.eval(), draw("categorical", 12), epochs=1, step="none")


def test_an_unknown_likelihood():
    refused("unknown likelihood 'poisson': use 'categorical' or 'gaussian'", mlp(5, 4, 3), draw("categorical", 6), "poisson")


@pytest.mark.parametrize(
    ("drawn", "likelihood", "message"),
    [
        ("categorical", "gaussian", r"targets \(\d+,\) of type torch.int64 .*likelihood='categorical'"),
        ("gaussian", "categorical", "the categorical likelihood takes integer class indices"),
    ],
    ids=["labels for a gaussian", "numbers for a categorical"],
)
def test_a_likelihood_that_does_not_fit_the_targets(drawn, likelihood, message):
    refused(message, mlp(5, 4, 3), draw(drawn, 12), likelihood)


@pytest.mark.fault(11)
def test_labels_out_of_range():
    x, _ = draw("categorical", 12)
    refused("labels run from 3 to 3, but the model has 3 outputs", mlp(5, 4, 3), (x, torch.full((12,), 3)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "laplace"),
        ("epochs", 0),
        ("batch_size", 0),
        ("every", 0),
        ("burn_in", -1),
        ("lr", 0.0),
        ("lr", -1.0),
        ("lr", math.nan),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("damping", 0.0),
        ("damping", 1.1),
        ("optimiser", "lbfgs"),
        ("trust", -1.0),
        ("clip", 0.0),
        ("warmup", -0.5),
        ("start_cap", 0.0),
        ("hyper_lr", 0.0),
        ("hyper_steps", 0),
    ],
)
def test_a_bad_field_of_the_schedule_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        Schedule(**{field: value})
    refused(field, mlp(5, 4, 3), draw("categorical", 12), **{field: value})


def test_an_unknown_keyword_is_named():
    refused("epoch", mlp(5, 4, 3), draw("categorical", 12), error=TypeError, epoch=3)
    refused("evidense_data", mlp(5, 4, 3), draw("categorical", 12), error=TypeError, evidense_data=None)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_an_exploding_rate_is_named(optimiser):
    """The proximal step alone holds any rate back; a prior that hardly holds does not."""
    options = {"lr": 1e200, "optimiser": optimiser, "prior_precision": 1e-300, "batch_size": 4, "epochs": 9}
    refused("lower lr", mlp(5, 4, 3), draw("gaussian", 12), "gaussian", **options)
