"""Likelihoods that a user wrote go wherever ours go."""

import copy
import json
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import autosym
from autosym.bayes.likelihoods import MEMBERS, Gaussian, Poisson, of
from autosym.evidence import gradient, kernel, variational
from autosym.evidence.cautions import Guessing, Little, OneClass
from autosym.papers import last_layer
from autosym.report import findings, page
from autosym.training import callbacks
from models import linear, mlp, small


class NegativeBinomial(autosym.Likelihood):
    """Counts with mean exp(f) and variance exp(f) + exp(2 f) / r. The Hessian depends on y; its mean is exp(f) r / (r + exp(f))."""

    name = "negative binomial"

    def __init__(self, r):
        self.r = r

    def check(self, outputs, targets):
        if targets.shape[1:] != (outputs,) or (targets < 0).any():
            raise ValueError("these are not counts of shape (N, outputs): give such")

    def statistic(self, outputs, targets):
        return self.of(outputs).log_prob(targets).sum()

    def root(self, outputs):
        return torch.diag_embed((outputs - torch.log1p(outputs.exp() / self.r)).div(2).exp())

    def predict(self, mean, covariance, draws):
        if draws is None:
            return None
        given = self.of(draws)
        return {"expected": given.mean.mean(0), "variance": given.variance.mean(0) + given.mean.var(0)}

    def of(self, outputs):
        return torch.distributions.NegativeBinomial(self.r, logits=outputs - math.log(self.r), validate_args=False)


class Weighted(nn.Module, autosym.Likelihood):
    """N(y | f, tau diag(1 / w)): known weights w of the outputs, a learned variance tau."""

    name = "weighted"

    def __init__(self, weights, closed_form=True):
        super().__init__()
        self.weights, self.log_tau = weights, nn.Parameter(torch.zeros((), dtype=torch.float64))
        if not closed_form:
            self.update = lambda *options, **named: autosym.Likelihood.update(self, *options, **named)

    def check(self, outputs, targets):
        assert targets.shape[1:] == (outputs,) == self.weights.shape

    def statistic(self, outputs, targets):
        return (self.weights.to(outputs) * (outputs - targets).square()).sum()

    def loss(self, outputs, targets):
        return self.statistic(outputs, targets) / 2

    def log_likelihood(self, statistic, count):
        constant = count * (self.log_tau + math.log(2 * math.pi)) - count / len(self.weights) * self.weights.log().sum()
        return -0.5 * (statistic * self.scale() + constant)

    def scale(self):
        return (-self.log_tau).exp()

    def root(self, outputs):
        return torch.diag_embed(self.weights.to(outputs).sqrt().expand_as(outputs))

    def figures(self):
        return {"tau": math.exp(float(self.log_tau.detach()))}

    @torch.no_grad()
    def update(self, statistic, count, damping=1.0, trust=math.inf):
        before = self.log_tau.clone()
        self.log_tau += (damping * ((statistic / count).log() - before)).clamp(-trust, trust)
        return (before - self.log_tau).exp()


def counts(samples=200):
    """Images, and counts that depend on where they are bright; more spread than Poisson's."""
    torch.manual_seed(1)
    x = torch.randn(samples, 2, 4, 4)
    f = 2 * x[:, :1, :2, :2].mean((2, 3)) + 1
    return x, NegativeBinomial(1.5).of(f).sample()


@pytest.fixture(scope="module")
def data():
    return counts()


@pytest.fixture(scope="module")
def fitted(data):
    torch.manual_seed(0)
    return autosym.fit(small("f-fc+conv", 1), data, NegativeBinomial(1.5), epochs=30, burn_in=5, every=5)


def test_its_curvature_is_the_mean_of_the_hessian():
    likelihood, f = NegativeBinomial(1.5), torch.tensor([[0.3], [-1.0], [1.2]], dtype=torch.float64)
    numbers = torch.arange(400.0, dtype=torch.float64)
    for one, root in zip(f, likelihood.root(f), strict=True):
        hessians = torch.func.hessian(lambda f: -likelihood.of(f).log_prob(numbers))(one)[:, 0, 0]
        mean = (likelihood.of(one).log_prob(numbers).exp() * hessians).sum()
        assert_close(root @ root.mT, mean.reshape(1, 1), rtol=1e-6, atol=0)
        assert float(hessians.min()) < 0.9 * float(mean), "the control: single ones are others"


def test_a_fit_learns(fitted, data):
    """Where the data are spread more than Poisson's its evidence is larger than that of our Poisson, and than by chance."""
    x, y = data
    torch.manual_seed(0)
    shuffled = autosym.fit(small("f-fc+conv", 1), (x, y[torch.randperm(200)]), NegativeBinomial(1.5), epochs=30)
    torch.manual_seed(0)
    poisson = autosym.fit(small("f-fc+conv", 1), data, "poisson", epochs=30)
    own, *others = (float(one.evidence.log_evidence) for one in (fitted, shuffled, poisson))
    assert own > max(others) + 10
    assert repr(fitted).endswith("samples (negative binomial), 30 epochs>")


def test_symmetry_and_simplify(fitted, data):
    """Position matters to these counts, so a free path is worth nats."""
    found = fitted.symmetry()
    assert not any(isinstance(caution, (Guessing, Little, OneClass)) for caution in found.cautions)
    assert sum(found.free_share().values()) > 0
    worth = autosym.simplify(fitted, data).model.simplification
    assert max(path.nats for path in worth.paths) > 10
    assert not all(path.left_out for path in worth.paths)


def test_predictive_without_a_closed_form_draws(fitted, data):
    x, y = data
    default, drawn, other = (fitted.predictive(x, *link) for link in ((), ("monte-carlo",), ("probit", 256, 1)))
    assert default.probabilities is None
    assert torch.equal(default.expected, drawn.expected)
    assert not torch.equal(default.expected, other.expected), "by another seed"
    assert (default.expected > 0).all()
    assert (default.variance > default.expected).all(), "more spread than Poisson's"
    right, wrong = ((y.roll(turn, 0).log1p() - default.expected.log1p()).square().mean() for turn in (0, 7))
    assert right < 0.7 * wrong


def test_compare(fitted, data):
    torch.manual_seed(0)
    other = autosym.fit(small("conv", 1), data, NegativeBinomial(1.5), epochs=30, burn_in=5, every=5)
    found = autosym.compare({"free": fitted, "conv": other}, data)
    assert found.best.name == "free", "position matters"
    assert not any("guess" in warning for warning in found.warnings)
    poisson = autosym.fit(small("conv", 1), data, "poisson", epochs=1)
    with pytest.raises(ValueError, match="a has a negative binomial likelihood, b a poisson one"):
        autosym.compare({"a": fitted, "b": poisson})


def test_harden(fitted, data):
    x, y = data
    cost = autosym.harden(fitted, data, tolerance=0.01).hardening.cost
    with torch.no_grad():
        exact = -float(NegativeBinomial(1.5).of(fitted.model(x)).log_prob(y).mean())
    assert cost.loss[0] == pytest.approx(exact, rel=1e-5)
    assert cost.loss[1] == pytest.approx(exact, abs=0.05)
    assert cost.accuracy is None


def test_report(fitted, data, tmp_path):
    pytest.importorskip("jinja2")
    said = findings.contents(fitted, data)
    assert (said["likelihood"], said["class_count"], said["calibration"]) == ("negative binomial", None, None)
    assert said["command"].startswith("autosym.fit(model, data, NegativeBinomial(...), ")
    json.dumps(said, allow_nan=False)
    written = fitted.report(tmp_path / "report.html", data, compare={"itself": fitted}).read_text()
    assert "<html" in written
    assert "guess" not in written


def test_other_estimates(data):
    """Kernel evidence in a fit, the variational bound, a last layer, a loop of one's own, and gradients in the forward pass."""
    x, y = data
    flat, likelihood = x.flatten(1).double(), NegativeBinomial(1.5)
    fit = autosym.fit(linear(32, 1), (flat, y), likelihood, epochs=20, kernel=50)
    with torch.no_grad():
        evidence = float(kernel.at(fit.model, (flat, y), likelihood)(fit.prior).log_evidence)
        posterior = variational.Posterior(fit.model, 0.05, fit.prior.precision()["weight"]).double()
        bound = float(variational.at(fit.model, (flat, y), posterior, likelihood).log_evidence)
    assert bound < evidence < 0
    found = last_layer.learn(nn.Identity(), (flat, y), 1, likelihood, epochs=20)
    assert abs(float(found.evidence.log_evidence) - evidence) < 60
    learner = autosym.Learner(mlp(32, 4, 1), (flat, y), likelihood)
    first, second = (float(learner.step().log_evidence) for _ in range(2))
    assert second > first
    net = autosym.symmetrise(nn.Sequential(nn.Flatten(), nn.Linear(32, 1)).double(), "rotation", 3)
    ranged = autosym.fit(net, (x.double(), y), likelihood, epochs=2)
    assert gradient.gradient(net, (x.double(), y), ranged.prior, ranged.laplace, {"raw": net.transformations.raw})


# ---- hyperparameters


def weighted():
    torch.manual_seed(3)
    x, weights = torch.randn(150, 4), torch.tensor([1.0, 25.0])
    return weights, (x, x @ torch.randn(4, 2) + 0.5 * torch.randn(150, 2) / weights.sqrt())


@pytest.mark.parametrize("step", ["mackay", "gradient"])
def test_a_hyperparameter_is_learned(step):
    weights, data = weighted()
    options = {"hyper_lr": 0.2, "hyper_steps": 20} if step == "gradient" else {}
    fit = autosym.fit(nn.Linear(4, 2), data, Weighted(weights), epochs=60, burn_in=5, every=5, step=step, **options)
    assert fit.likelihood.figures()["tau"] == pytest.approx(0.25, rel=0.3)
    found = fit.predictive(data[0])
    assert found.expected is found.variance is None, "no predict() was written"
    said = findings.contents(fit)
    assert said["tau"] == said["hyperparameters"]["tau"] == fit.likelihood.figures()["tau"]
    line = next(line for line in fit.history if "tau" in line)
    assert callbacks.scalars(line, 150)["tau"] == line["tau"]
    assert {"name": "tau", "key": "tau", "value": said["tau"], "unit": ""} in page.key_figures(said)


def test_equal_weights_are_our_gaussian():
    """Bit for bit the same precisions, noise and evidence."""
    _, data = weighted()
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    options = {"epochs": 10, "burn_in": 0, "every": 2}
    own = autosym.fit(copy.deepcopy(net), data, Weighted(torch.ones(2)), **options)
    ours = autosym.fit(copy.deepcopy(net), data, Gaussian(), **options)
    assert own.prior.precision() == ours.prior.precision()
    assert own.likelihood.log_tau == ours.likelihood.log_variance != 0
    assert float(own.evidence.log_evidence) == pytest.approx(float(ours.evidence.log_evidence), rel=1e-12)


def test_a_hyperparameter_without_a_closed_form_is_not_passed_over():
    weights, data = weighted()
    with pytest.raises(
        ValueError, match=r"the weighted likelihood learns log_tau but has no closed-form step: .*step='gradient'"
    ):
        autosym.fit(nn.Linear(4, 2), data, Weighted(weights, closed_form=False), epochs=5, burn_in=0, every=1)
    fixed = Weighted(weights, closed_form=False).requires_grad_(False)
    autosym.fit(nn.Linear(4, 2), data, fixed, epochs=5, burn_in=0, every=1)


def test_a_hyperparameter_is_in_checkpoints(tmp_path):
    weights, data = weighted()

    def stop(line):
        if line["epoch"] == 4:
            raise KeyboardInterrupt

    torch.manual_seed(0)
    net, options = nn.Linear(4, 2), {"epochs": 8, "burn_in": 0, "every": 2, "checkpoint_seconds": 0.0}
    whole = autosym.fit(copy.deepcopy(net), data, Weighted(weights), **options)
    with pytest.raises(KeyboardInterrupt):
        autosym.fit(copy.deepcopy(net), data, Weighted(weights), log=stop, checkpoint=tmp_path / "c", **options)
    resumed = autosym.fit(copy.deepcopy(net), data, Weighted(weights), checkpoint=tmp_path / "c", resume=True, **options)
    assert resumed.likelihood.log_tau == whole.likelihood.log_tau != 0


# ---- classes that do not inherit


def duck(*without):
    """A class with the members of Poisson and without its parent."""
    return type("Duck", (), {name: getattr(Poisson, name) for name in MEMBERS if name not in without})()


def test_a_class_with_all_members_need_not_inherit(data):
    assert type(duck()).__mro__[1:] == (object,)
    assert isinstance(duck(), autosym.Likelihood)
    fits = []
    for likelihood in (duck(), Poisson()):
        torch.manual_seed(0)
        fits.append(autosym.fit(small("f-fc+conv", 1), data, likelihood, epochs=4, burn_in=0, every=1))
    assert float(fits[0].evidence.log_evidence) == float(fits[1].evidence.log_evidence)


def test_what_a_class_lacks_is_named(data):
    with pytest.raises(
        TypeError, match=r"the likelihood Duck lacks root, figures: write them, or inherit from autosym.Likelihood"
    ):
        autosym.fit(small("f-fc+conv", 1), data, duck("root", "figures"), epochs=1)
    with pytest.raises(TypeError, match=r"abstract method.* root"):
        type("Half", (autosym.Likelihood,), {"name": "half", "check": Poisson.check, "statistic": Poisson.statistic})()

    class Nameless(NegativeBinomial):
        name = property(lambda self: self.missing)

    with pytest.raises(TypeError, match="the likelihood Nameless lacks name"):
        of(Nameless(1.0))


def test_a_root_with_fewer_columns_is_filled_up_and_one_with_more_refused():
    class Wide(NegativeBinomial):
        columns = 1

        def root(self, outputs):
            return torch.ones(len(outputs), outputs.shape[1], self.columns)

    f, index = torch.zeros(3, 2), torch.tensor([0, 1, 0])
    likelihood = Wide(1.0)
    assert likelihood.column(f, index).tolist() == [[1, 1], [0, 0], [1, 1]]
    likelihood.columns = 3
    with pytest.raises(ValueError, match="more columns than outputs: give it at most as many"):
        likelihood.column(f, index)
