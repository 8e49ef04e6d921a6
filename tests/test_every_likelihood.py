"""What every likelihood owes the library, against torch.distributions and dense oracles: a new one in LIKELIHOODS is tested for free."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.func import hessian, vmap
from torch.testing import assert_close

import autosym
import oracles
from autosym.bayes.likelihoods import LIKELIHOODS as NAMED
from autosym.bayes.likelihoods import Bernoulli, Likelihood, Poisson, classes
from autosym.curvature.kronecker import kfac
from autosym.evidence import kernel, laplace, variational
from autosym.evidence.cautions import Guessing
from autosym.nn import layers
from autosym.papers import last_layer
from autosym.report import findings
from factories import LIKELIHOODS
from models import linear, mlp

EXACT = {"rtol": 1e-10, "atol": 1e-10}
every = pytest.mark.parametrize("case", LIKELIHOODS)


def outputs(case, samples=6, spread=1.5):
    """Outputs f, and targets drawn given them."""
    f = spread * torch.randn(samples, case.outputs, dtype=torch.float64)
    return f, case.draw(f)


def problem(case, samples=40, size=4, strength=1.0):
    """A linear model, inputs, and targets that depend on them."""
    model, x = linear(size, case.outputs), torch.randn(samples, size, dtype=torch.float64)
    return model, x, case.draw(strength * x @ torch.randn(size, case.outputs, dtype=torch.float64))


def differs(a, b, by=1e-3):
    return bool(((a - b).abs() > by).any())


def test_every_named_likelihood_is_in_the_list():
    assert {case.values[0].make().name for case in LIKELIHOODS} == set(NAMED)


@every
def test_it_is_one(case):
    likelihood = case.make()
    assert isinstance(likelihood, Likelihood)
    assert isinstance(copy.deepcopy(likelihood), type(likelihood))
    assert not isinstance(nn.Linear(1, 1), Likelihood)


# ---- its mathematics


@every
def test_the_root_is_a_root_of_the_hessian(case):
    likelihood, (f, y) = case.make(), outputs(case)
    exact = vmap(hessian(lambda f, y: -case.log_prob(f[None], y[None])))(f, y)
    scale, root = likelihood.scale().detach(), likelihood.root(f)
    assert root.shape[2] <= case.outputs
    assert_close(scale * root @ root.mT, exact, **EXACT)
    assert_close(scale * likelihood.diagonal(f), exact.diagonal(dim1=1, dim2=2), **EXACT)
    columns = [likelihood.column(f, torch.full((len(f),), index)) for index in range(case.outputs)]
    assert_close(scale * sum(c[:, :, None] * c[:, None, :] for c in columns), exact, **EXACT)
    assert differs(1.01 * scale * root @ root.mT, exact), "the control"


@every
def test_the_slope_of_the_loss(case):
    likelihood, (f, y) = case.make(), outputs(case)
    f.requires_grad_()
    (found,) = torch.autograd.grad(likelihood.loss(f, y), f)
    (exact,) = torch.autograd.grad(-case.log_prob(f, y), f)
    assert_close(likelihood.scale().detach() * found, exact, **EXACT)
    (other,) = torch.autograd.grad(likelihood.loss(f, y.roll(1, 0)), f)
    assert differs(other, found), "the control"


@every
def test_the_log_likelihood_is_torchs(case):
    likelihood, (f, y) = case.make(), outputs(case)
    value = likelihood.log_likelihood(likelihood.statistic(f, y), f.numel()).detach()
    assert_close(value, case.log_prob(f, y), **EXACT)
    parts = likelihood.statistic(f[:2], y[:2]) + likelihood.statistic(f[2:], y[2:])
    assert_close(likelihood.log_likelihood(parts, f.numel()).detach(), value, **EXACT)
    assert abs(float(value - case.log_prob(f, y.roll(1, 0)))) > 1e-3, "the control"


@every
def test_expectations_in_closed_form_are_those_of_draws(case):
    likelihood, (f, y) = case.make(), outputs(case)
    variance = 0.1 + 0.2 * torch.rand_like(f)
    found = likelihood.expected(f, variance, y)
    if found is None:
        return
    draws = f + variance.sqrt() * torch.randn(20_000, *f.shape, dtype=f.dtype)
    statistics = torch.stack([likelihood.statistic(one, y) for one in draws])
    error = 5 * float(statistics.std()) / math.sqrt(len(draws))
    assert float(found[0]) == pytest.approx(float(statistics.mean()), abs=error)
    assert abs(float(likelihood.statistic(f, y) - statistics.mean())) > error, "the control: without variance it is another"
    diagonals = torch.stack([likelihood.diagonal(one) for one in draws])
    assert_close(found[1], diagonals.mean(0), rtol=0.02, atol=0)


@every
def test_an_update_is_to_the_most_likely_hyperparameters_and_says_how_the_scale_grew(case):
    likelihood, (f, y) = case.make(), outputs(case)
    before, statistic = float(likelihood.scale().detach()), likelihood.statistic(f, y)
    grown = float(likelihood.update(statistic, f.numel()))
    assert float(likelihood.scale().detach()) == pytest.approx(before * grown, rel=1e-12)
    assert (grown != 1) == bool(likelihood.hyperparameters())
    for tensor in likelihood.hyperparameters().values():
        (slope,) = torch.autograd.grad(likelihood.log_likelihood(statistic, f.numel()), tensor)
        assert abs(float(slope)) < 1e-10
        likelihood.update(2 * statistic, f.numel(), trust=0.1)
        assert float(likelihood.scale().detach()) == pytest.approx(before * grown * math.exp(-0.1))


def test_some_have_closed_forms_and_some_have_none():
    case = {one.id: one.values[0] for one in LIKELIHOODS}
    known = {name: c.make().expected(*outputs(c)[:1], torch.ones(6, c.outputs), outputs(c)[1]) for name, c in case.items()}
    assert {name for name, value in known.items() if value is not None} == {"gaussian", "poisson"}


@pytest.mark.parametrize("f", [80.0, -80.0])
def test_certain_outputs_of_a_bernoulli_have_finite_slopes(f):
    f = torch.tensor([[f]], requires_grad=True)
    root = Bernoulli().root(f)
    (slope,) = torch.autograd.grad(root.sum(), f)
    assert 0 < float(root.detach()) < 1e-10
    assert torch.isfinite(slope).all()


def test_large_counts_do_not_cancel():
    rate, counts = torch.full((50, 1), math.log(20_000.0)), torch.full((50, 1), 20_000)
    exact = torch.distributions.Poisson(rate.double().exp()).log_prob(counts.double()).sum()
    assert float(Poisson().statistic(rate, counts)) == pytest.approx(float(exact), rel=1e-6)


# ---- targets


@every
def test_targets_that_do_not_suit_are_refused(case):
    likelihood = case.make()
    for targets, message in case.refused:
        with pytest.raises(ValueError, match=message):
            likelihood.check(case.outputs, targets)
    likelihood.check(case.outputs, outputs(case)[1])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.long, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(6,), (6, 1)])
@pytest.mark.parametrize("likelihood", [Bernoulli(), Poisson()], ids=lambda one: one.name)
def test_targets_of_every_type_and_shape_are_the_same(likelihood, shape, dtype):
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 0])
    model = linear(4, 1)
    expected = autosym.log_evidence(model, (x, y), likelihood)
    assert autosym.log_evidence(model, (x, y.to(dtype).reshape(shape)), likelihood) == pytest.approx(expected, abs=1e-12)
    assert autosym.log_evidence(model, (x, 1 - y), likelihood) != pytest.approx(expected, abs=1e-3), "the control"


def test_a_bernoulli_takes_one_logit():
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 1, 0, 1, 0])
    with pytest.raises(ValueError, match=r"the model has 2 outputs, but a Bernoulli likelihood takes one.*'categorical'"):
        autosym.fit(nn.Linear(4, 2), (x, y), "bernoulli", epochs=1)
    with pytest.raises(ValueError, match="needs one per class: use two, or likelihood='bernoulli'"):
        autosym.fit(nn.Linear(4, 1), (x, y), epochs=1)


def test_a_sigmoid_at_the_end_is_refused_where_the_likelihood_has_one():
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 1, 0, 1, 0])
    net = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 1))
    autosym.log_evidence(net, (x, y), "bernoulli")
    with pytest.raises(ValueError, match=r"are probabilities, by 3 \(Sigmoid\): .*; leave it out of the model"):
        autosym.log_evidence(nn.Sequential(*net, nn.Sigmoid()), (x, y), "bernoulli")
    autosym.log_evidence(nn.Sequential(*net, nn.Sigmoid()), (x, y[:, None].float()), "gaussian")


# ---- evidence


@every
@pytest.mark.parametrize("precision", [0.3, 4.0])
def test_evidence_of_a_linear_model_is_the_dense_one(case, precision):
    """Kernel evidence with all samples; Kronecker factors, and those by signs where there is one column, for one sample."""
    model, x, y = problem(case, 7)
    likelihood = case.make()
    at = kernel.at(model, (x, y), likelihood)
    exact = oracles.laplace_log_evidence(model, x, lambda f: case.log_prob(f, y), precision)
    with torch.no_grad():
        assert float(at(autosym.Prior(at.names, precision)).log_evidence) == pytest.approx(exact, rel=1e-10)
    one = x[:1], y[:1]
    exact = oracles.laplace_log_evidence(model, x[:1], lambda f: case.log_prob(f, y[:1]), precision)
    assert autosym.log_evidence(model, one, likelihood, precision) == pytest.approx(exact, rel=1e-10)
    if likelihood.root(model(x)).shape[2] == 1:
        assert autosym.log_evidence(model, one, likelihood, precision, sampled=True) == pytest.approx(exact, rel=1e-10)
    likelihood.root = lambda f: 1.1 * type(likelihood).root(likelihood, f)
    assert autosym.log_evidence(model, one, likelihood, precision) != pytest.approx(exact, rel=1e-4), "the control"


@every
def test_sampled_curvature_is_the_exact_one_in_the_mean(case):
    model, x, y = problem(case, 5)
    exact = kfac(model, (x, y), case.make()).factors["weight"].G
    means = [
        torch.stack([kfac(model, (x, y), case.make(), sampled=True, seed=s).factors["weight"].G for s in seeds]).mean(0)
        for seeds in (range(200), range(1))
    ]
    assert_close(means[0], exact, rtol=0.2, atol=0.1 * float(exact.abs().max()))
    assert torch.equal(means[1], exact) == (case.make().root(model(x)).shape[2] == 1), "one draw is exact with one column only"


@every
def test_bounds_are_below_the_evidence(case):
    """Of a Gaussian at its posterior the variational bound is the evidence; elsewhere, and with one output, bounds are below it."""
    model, x, y = problem(case, 12)
    fit = autosym.fit(model, (x, y), case.make(), epochs=300, lr=0.05, step="none", prior_precision=2.0)
    full = kernel.at(model, (x, y), fit.likelihood)
    with torch.no_grad():
        evidence = float(full(fit.prior).log_evidence)
        parts = float(kernel.at(model, (x, y), fit.likelihood, parts=2)(fit.prior).log_evidence)
        ones = [kernel.at(model, (x, y), fit.likelihood, outputs="one", seed=s)(fit.prior).log_evidence for s in range(20)]
    assert parts <= evidence + 1e-9
    assert float(torch.stack(ones).mean()) <= evidence + 1e-9
    posterior = variational.Posterior(model, std=0.05, precision=2.0).double()
    assert float(variational.at(model, (x, y), posterior, fit.likelihood, count=50).log_evidence.detach()) < evidence


@every
def test_the_last_layer_learns_by_its_bound(case):
    """More than a bound that is not trained, and no more than the dense evidence of the same features, up to what Laplace errs."""
    _, x, y = problem(case, 60)
    found = [
        last_layer.learn(nn.Identity(), (x, y), case.outputs, case.make(), epochs=epochs, batch_size=20) for epochs in (1, 30)
    ]
    bounds = [float(one.evidence.log_evidence) for one in found]
    assert bounds[1] > bounds[0] - 1
    head, model = found[1].head, linear(4, case.outputs)
    model.weight.data = head.mean.detach().clone()
    likelihood = found[1].likelihood
    at = kernel.at(model, (x, y), likelihood)
    with torch.no_grad():
        evidence = float(at(autosym.Prior(at.names, float(head.log_precision.exp()))).log_evidence)
    assert evidence - 2 < bounds[1] < evidence + 2
    point = last_layer.learn(nn.Identity(), (x, y), case.outputs, case.make(), epochs=2, point_estimate=True)
    assert point.evidence is None


# ---- fits


def training(case, net, shuffled=False, strength=1.0):
    """A fit, and samples that it has not seen."""
    torch.manual_seed(2)
    _, x, y = problem(case, 300, strength=strength)
    y, new = (y[torch.randperm(300)] if shuffled else y), (x[200:], y[200:])
    return autosym.fit(net, (x[:200], y[:200]), case.make(), epochs=60, lr=0.03, batch_size=25), new


def held_out(fit, new):
    with torch.no_grad():
        f = fit.model(new[0])
        return float(fit.likelihood.log_likelihood(fit.likelihood.statistic(f, new[1]), f.numel())) / len(f)


@every
def test_a_short_fit_learns(case):
    """It predicts new samples better than a fit of shuffled targets, and says so of its evidence."""
    net = mlp(4, 6, case.outputs)
    (fit, new), (other, _) = training(case, copy.deepcopy(net)), training(case, net, shuffled=True)
    assert held_out(fit, new) > held_out(other, new) + 0.1
    assert float(fit.evidence.log_evidence) > float(other.evidence.log_evidence) + 5
    count = classes(fit.likelihood, case.outputs)
    said = [any(isinstance(caution, Guessing) for caution in one.symmetry().cautions) for one in (fit, other)]
    assert said == [False, count is not None]


@every
def test_reports_comparisons_and_hardening_measure_classes_where_there_are_some(case):
    fit, new = training(case, nn.Sequential(layers.fc((4,), (case.outputs,))).double())
    count, said = classes(fit.likelihood, case.outputs), findings.contents(fit, new)
    cost = autosym.harden(fit, new).hardening.cost
    warned = any(f"guessing one of {count} classes" in warning for warning in autosym.compare([fit, fit]).warnings)
    assert said["class_count"] == count
    assert said["command"].startswith(f"autosym.fit(model, data, '{fit.likelihood.name}', ")
    assert cost.loss[0] == pytest.approx(-held_out(fit, new))
    if count is None:
        assert (said["calibration"], cost.accuracy, warned) == (None, None, False)
        return
    right = float((case.distribution(fit.model(new[0])).mode.flatten() == new[1].flatten()).double().mean())
    assert right > 1.2 / count
    assert said["calibration"]["accuracy"] == cost.accuracy[0] == pytest.approx(right)
    assert said["calibration"]["nll"] == pytest.approx(-held_out(fit, new))
    gained = 1 + float(fit.evidence.log_evidence) / (200 * math.log(count))
    assert warned == (gained < 0.2)


@every
@pytest.mark.parametrize("step", ["mackay", "gradient"])
def test_precisions_are_learned_and_evidence_rises(case, step):
    _, x, y = problem(case, 40)
    learner = autosym.Learner(mlp(4, 6, case.outputs), (x, y), case.make(), step=step, hyper_steps=5)
    before = laplace.at(learner.model, (x, y), learner.likelihood)(learner.prior).log_evidence.detach()
    after = learner.step().log_evidence
    assert float(after) > float(before)
    again = autosym.Learner(learner.model, (x, y), case.make(), step=step)
    again.load_state_dict(learner.state_dict())
    assert again.likelihood.figures() == learner.likelihood.figures()
    assert (learner.likelihood.figures() != case.make().figures()) == bool(learner.likelihood.hyperparameters())


@every
def test_a_run_is_resumed_bit_for_bit(case, tmp_path):
    _, x, y = problem(case, 24)
    net, options = mlp(4, 3, case.outputs), {"epochs": 6, "burn_in": 0, "every": 1, "checkpoint_seconds": 0.0}

    def stop(line):
        if line["epoch"] == 3:
            raise KeyboardInterrupt

    whole = autosym.fit(copy.deepcopy(net), (x, y), case.make(), **options)
    with pytest.raises(KeyboardInterrupt):
        autosym.fit(copy.deepcopy(net), (x, y), case.make(), log=stop, checkpoint=tmp_path / "c", **options)
    fit = autosym.fit(copy.deepcopy(net), (x, y), case.make(), checkpoint=tmp_path / "c", resume=True, **options)
    assert len(fit.history) == 6
    for one, two in zip(fit.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(fit.prior.log_precision, whole.prior.log_precision)
    assert fit.likelihood.figures() == whole.likelihood.figures()


def test_a_checkpoint_of_another_likelihood_is_refused(tmp_path):
    x, y = torch.randn(12, 4), torch.arange(12) % 2
    autosym.fit(nn.Linear(4, 1), (x, y), "bernoulli", epochs=2, checkpoint=tmp_path / "c")
    with pytest.raises(ValueError, match=r"is of a run with other settings, \{'likelihood': 'bernoulli'\}"):
        autosym.fit(nn.Linear(4, 1), (x, y), "poisson", epochs=2, checkpoint=tmp_path / "c", resume=True)
    autosym.fit(nn.Linear(4, 1), (x, y), "bernoulli", epochs=2, checkpoint=tmp_path / "c", resume=True)


def test_a_state_of_another_likelihood_is_refused():
    data = torch.randn(12, 4), torch.arange(12)[:, None] % 2.0
    state = autosym.Learner(nn.Linear(4, 1), data, "gaussian").state_dict()
    with pytest.raises(
        ValueError, match=r"is of another likelihood: it holds \['log_variance'\] and the poisson likelihood \[\]"
    ):
        autosym.Learner(nn.Linear(4, 1), data, "poisson").load_state_dict(state)


# ---- predictions


@every
def test_the_predictive_is_one_of_targets(case):
    fit, (x, y) = training(case, linear(4, case.outputs), strength=0.5)
    found, drawn = fit.predictive(x, scale=1.0), fit.predictive(x, "monte-carlo", samples=20_000, scale=1.0)
    if classes(fit.likelihood, case.outputs):
        assert found.expected is found.variance is None
        assert_close(found.probabilities.sum(1), torch.ones(100).double(), rtol=0, atol=1e-12)
        assert 0 < found.probabilities.min() <= found.probabilities.max() < 1
        assert (found.probabilities - drawn.probabilities).abs().mean() < 0.01
        assert (found.probabilities - drawn.probabilities.roll(1, 0)).abs().mean() > 0.1, "the control"
        sure = found.probabilities.gather(1, y.long().reshape(-1, 1))
        assert float(sure.log().mean()) > -math.log(classes(fit.likelihood, case.outputs)), "better than guessing"
        return
    assert found.probabilities is None
    assert found.expected.shape == found.variance.shape == (100, case.outputs)
    assert (found.variance > 0).all()
    assert_close(drawn.expected, found.expected, rtol=0.05, atol=0.01)
    assert_close(drawn.variance, found.variance, rtol=0.2, atol=0.01)
    errors = ((y.roll(turn, 0) - found.expected).square().sum() for turn in (0, 1))
    right, wrong = (float(error / found.variance.sum()) for error in errors)
    assert 0.5 < right < 2 < wrong, "errors are as large as they are said to be; those of others' targets are not"


def test_rates_are_positive_and_larger_where_outputs_are_uncertain():
    mean, zero = torch.zeros(1, 1).double(), torch.zeros(1, 1, 1).double()
    sure, unsure = (Poisson().predict(mean, zero + v, None) for v in (0.0, 1.0))
    assert float(sure["expected"]) == float(sure["variance"]) == 1
    assert float(unsure["expected"]) == pytest.approx(math.exp(0.5))
    rates = (torch.randn(400_000, 1, 1).double()).exp()
    assert float(unsure["variance"]) == pytest.approx(float(rates.mean() + rates.var()), rel=0.05)


def test_a_bernoulli_is_a_categorical_of_two_classes():
    """With the logits (0, f) they are one model: the same log-likelihood, curvature and probabilities."""
    f, y = outputs(next(one.values[0] for one in LIKELIHOODS if one.id == "bernoulli"))
    two, both = autosym.Categorical(), torch.cat([torch.zeros_like(f), f], 1)
    labels = y[:, 0].long()
    assert_close(Bernoulli().statistic(f, y), two.statistic(both, labels), **EXACT)
    assert_close(Bernoulli().diagonal(f), two.diagonal(both)[:, 1:], **EXACT)
    assert_close(Bernoulli().logits(f).softmax(1), both.softmax(1), **EXACT)
    assert classes(Bernoulli(), 1) == 2
    assert classes(Poisson(), 2) is None
