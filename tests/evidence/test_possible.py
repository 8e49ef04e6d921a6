"""What evidence can be at most, against brute force; for which networks that is known; and when an estimate has failed."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autosym
from autosym.bayes.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson, relabels
from autosym.bayes.priors import Prior
from autosym.evidence import kernel, laplace, possible
from autosym.evidence.cautions import Impossible, Saturated
from autosym.evidence.record import Evidence
from autosym.nn import nets
from models import certain, columns, convnet, draw, mlp, relaxed

# ---- the bound


def test_the_bound_counts_relabellings():
    def most(seen, outputs=4):
        return possible.most(Categorical(), outputs, seen)

    assert [most(seen) for seen in range(5)] == pytest.approx([0.0, *(-math.log(n) for n in (4, 12, 24, 24))])
    assert most(1, 1000) == pytest.approx(-math.log(1000))
    assert [possible.most(Bernoulli(), 1, seen) for seen in (1, 2)] == pytest.approx([-math.log(2)] * 2)
    assert possible.most(Gaussian(), 3) == possible.most(Poisson(), 3) == math.inf


def weights(sizes, kind, count):
    """Draws (count, *size) from the prior of each parameter: Gaussian, or Student-t with a scale for each row."""
    for size in sizes:
        draws = 3 * torch.randn(count, *size, dtype=torch.float64)
        if kind == "student-t":
            scales = torch.distributions.Gamma(1.0, 1.0).sample((count, size[0])).double()
            draws /= scales.sqrt().reshape(count, size[0], *(1,) * (len(size) - 1))
        yield draws


def likelihoods_of(labellings, x, classes, kind, head=None, count=40_000):
    """p(D | w) for draws w of the prior of a network 2-3-classes, (labellings, draws); ``head`` is frozen if it is given."""
    outputs = 1 if kind == "one logit" else classes
    a, b, c, d = weights([(3, 2), (3,), (outputs, 3), (outputs,)], kind, count)
    hidden = torch.tanh(x @ a.mT + b[:, None])
    f = hidden @ c.mT + d[:, None] if head is None else hidden @ head[0].T + head[1]
    if outputs == 1:
        f = torch.cat([torch.zeros_like(f), f], -1)
    logs = f.log_softmax(-1)  # (draws, N, C)
    return torch.stack([logs[:, torch.arange(len(x)), torch.tensor(y)].sum(1).exp() for y in labellings])


CASES = [  # classes, labels, kind of prior
    (3, (0, 1, 2, 0, 1, 2), "gaussian"), (3, (0, 1, 1, 0, 0, 0), "gaussian"), (4, (2, 2), "gaussian"), (3, (0, 1, 2), "student-t"),
    (2, (0, 1, 1, 0), "one logit"), (2, (1, 1, 1), "one logit"),
]  # fmt: skip


@pytest.mark.parametrize(("classes", "labels", "kind"), CASES)
def test_the_evidence_by_brute_force_is_not_above_the_bound_and_does_not_depend_on_names_of_classes(classes, labels, kind):
    x = torch.randn(len(labels), 2, dtype=torch.float64)
    labellings = sorted({tuple(order[label] for label in labels) for order in itertools.permutations(range(classes))})
    found = likelihoods_of(labellings, x, classes, kind)
    assert float(found.sum(0).max()) <= 1 + 1e-9, "relabellings exclude each other"
    seen, likelihood = len(set(labels)), Bernoulli() if kind == "one logit" else Categorical()
    most = possible.most(likelihood, 1 if kind == "one logit" else classes, seen)
    assert most == pytest.approx(-math.log(len(labellings)))
    evidence, error = found.mean(1), found.std(1) / found.shape[1] ** 0.5
    assert (evidence <= math.exp(most) + 4 * error).all()
    assert ((evidence - evidence.mean()).abs() <= 4.5 * error).all(), "all relabellings are alike"


def test_one_label_has_exactly_the_bound():
    found = likelihoods_of([(1,)], torch.randn(1, 2, dtype=torch.float64), 4, "gaussian", count=200_000)
    assert float(found.mean()) == pytest.approx(math.exp(possible.most(Categorical(), 4, 1)), rel=0.02)


def test_with_a_frozen_head_the_evidence_can_be_above_it():
    """So the bound must not be applied there: the head knows which class is which."""
    head = torch.zeros(3, 3).double(), torch.tensor([9.0, 0.0, 0.0]).double()
    found = likelihoods_of([(0, 0, 0)], torch.randn(3, 2, dtype=torch.float64), 3, "gaussian", head)
    assert math.log(float(found.mean())) > possible.most(Categorical(), 3, 1) + 1


# ---- for which networks it is known


class Changed(nn.Module):
    """A network with something done to its outputs."""

    def __init__(self, change, net=None):
        super().__init__()
        self.net, self.change = net or mlp(5, 4, 3), change

    def forward(self, x):
        return self.change(self.net(x))


class TwoHeads(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(5, size).double() for size in sizes)

    def forward(self, x):
        found = [head(x) for head in self.heads]
        return sum(found) if len({t.shape for t in found}) == 1 else torch.cat(found, 1)


def frozen(model, *names, zero=False):
    for name in names:
        parameter = model.get_parameter(name).requires_grad_(False)
        if zero:
            nn.init.zeros_(parameter)
    return model


def averaging_head():
    return nn.Sequential(nn.Conv2d(2, 3, 3).double(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def averaged():
    return autosym.symmetrise(nn.Sequential(nn.Flatten(1), mlp(32, 4, 3)), {"rotation": 0.5}, samples=3).double()


def relaxed_head():
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3)).double()
    return autosym.relax(net, torch.randn(2, 2, 4, 4))


MAPS = (2, 4, 4)
ALIKE = {
    "mlp": (lambda: mlp(5, 4, 3), (5,)),
    "hidden layers as wide as the outputs": (lambda: mlp(5, 3, 3, 3), (5,)),
    "convnet": (convnet, (2, 6, 5)),
    "a convolution as the head": (averaging_head, MAPS),
    "a log-softmax": (lambda: Changed(lambda f: f.log_softmax(1)), (5,)),
    "a temperature": (lambda: Changed(lambda f: f / 7), (5,)),
    "two heads that are added": (lambda: TwoHeads((3, 3)), (5,)),
    "frozen below": (lambda: frozen(mlp(5, 4, 3), "0.weight", "0.bias"), (5,)),
    "no bias": (lambda: frozen(mlp(5, 4, 3), "2.bias", zero=True), (5,)),
    "averaged": (averaged, MAPS),
    "a relaxed head": (relaxed_head, MAPS),
    **{name: (lambda name=name: relaxed(name), MAPS) for name in nets.NAMES},
}  # fmt: skip
UNLIKE = {
    "a frozen head": lambda: frozen(mlp(5, 4, 3), "2.weight", "2.bias"),
    "frozen weights of the head": lambda: frozen(mlp(5, 4, 3), "2.weight"),
    "a frozen bias of the head": lambda: frozen(mlp(5, 4, 3), "2.bias"),
    "a fixed scale of a class": lambda: Changed(lambda f: f * torch.tensor([1.0, 1.0, 1.01])),
    "a fixed number for a class": lambda: Changed(lambda f: f + torch.tensor([0.0, 0.0, 0.01])),
    "two heads side by side": lambda: TwoHeads((1, 2)),
    "outputs that are mixed": lambda: Changed(lambda f: f.cumsum(1)),
}


@pytest.mark.parametrize("case", ALIKE)
def test_the_bound_is_known_if_the_prior_does_not_know_which_class_is_which(case):
    build, shape = ALIKE[case]
    torch.manual_seed(0)
    model, (x, _) = build(), draw("categorical", 6, shape)
    for labels, seen in (((0, 1, 2, 0, 1, 2), 3), ((2, 0, 0, 2, 2, 2), 2)):
        at = laplace.at(model, (x, torch.tensor(labels)))
        assert at.classes_seen == seen
        assert at(Prior(at.names)).most == pytest.approx(-math.log(6))
    float32 = laplace.at(model.float(), (x.float(), torch.tensor(labels)))
    assert float32.classes_seen == seen


@pytest.mark.parametrize("case", UNLIKE)
def test_it_is_not_claimed_for_others(case):
    torch.manual_seed(0)
    at = laplace.at(UNLIKE[case](), draw("categorical", 6))
    assert at.classes_seen == 0
    assert at(Prior(at.names)).most == 0.0, "a probability is at most 1"


def test_classes_are_counted_over_all_batches_also_where_curvature_is_not_taken():
    model, (x, y) = mlp(5, 4, 9), (torch.randn(9, 5).double(), torch.arange(9) % 7)
    for options in ({}, {"batch_size": 2}, {"subset": 2}, {"sampled": True, "memory": 1e-9}):
        assert laplace.at(model, (x, y), **options).classes_seen == 7, options
    assert kernel.at(model, (x, y), samples=3).classes_seen == 7
    assert laplace.at(mlp(5, 4, 1), (x, y > 2), "bernoulli").classes_seen == 2
    assert laplace.at(mlp(5, 4, 1), (x, torch.ones(9, 1)), "bernoulli").classes_seen == 1
    assert laplace.at(mlp(5, 4, 9), draw("gaussian", 9, outputs=9), "gaussian").classes_seen == 0


def test_the_sign_of_one_logit():
    x, y = torch.randn(9, 5).double(), torch.arange(9) % 2
    for bias, most in ((0.0, -math.log(2)), (0.1, 0.0)):
        model = frozen(mlp(5, 4, 1), "2.bias")
        nn.init.constant_(model[2].bias, bias)
        at = laplace.at(model, (x, y), "bernoulli")
        assert at(Prior(at.names)).most == pytest.approx(most)


class Tempered(Likelihood):
    """Classes by a function of the outputs; ``order`` changes which class is which."""

    name = "tempered"

    def __init__(self, logits):
        self.of = logits

    def check(self, outputs, targets):
        return

    def logits(self, outputs):
        return self.of(outputs)

    def statistic(self, outputs, targets):
        return self.logits(outputs).log_softmax(1).gather(1, targets[:, None]).sum()

    def root(self, outputs):
        return Categorical().root(outputs)


@pytest.mark.parametrize(
    ("logits", "outputs", "expected"),
    [
        (lambda f: f / 2, 3, True),
        (lambda f: f - f.sum(-1, keepdim=True), 3, True),
        (lambda f: f * torch.tensor([1.0, 1.0, 2.0]), 3, False),
        (lambda f: f + torch.tensor([1.0, 0.0, 0.0]), 3, False),
        (lambda f: f.flip(-1), 3, False),
        (lambda f: f + f.roll(1, -1) / 2, 3, False),  # in circles only
        (lambda f: F.pad(f, (0, 1)), 2, False),  # the last class is apart
        (lambda f: F.pad(f, (1, 0)), 1, True),
        (lambda f: torch.cat([f, -f, 0 * f], -1), 1, False),
        (lambda f: F.pad(f - 1, (1, 0)), 1, False),
        (lambda f: None, 3, False),
    ],
)
def test_likelihoods_of_ones_own_are_asked_whether_outputs_are_classes(logits, outputs, expected):
    likelihood = Tempered(logits)
    assert relabels(likelihood, outputs) is expected
    if outputs == 3 and logits(torch.zeros(1, 3)) is not None:
        assert laplace.at(mlp(5, 4, 3), draw("categorical", 9), likelihood).classes_seen == (3 if expected else 0)


# ---- when an estimate has failed

LN4, MOST = math.log(4), -math.log(24)


def reason(log_evidence=-100.0, log_likelihood=-5.0, gamma=9.0, classes=4, most=MOST):
    return possible.reason(log_evidence, log_likelihood, 100, most, classes, gamma, 0.1)


def test_evidence_above_the_bound_has_failed():
    assert reason(MOST + 1e-6) == Impossible(MOST + 1e-6, MOST, 0.1)
    assert reason(MOST) is None
    assert reason(1e-6, most=0.0) == Impossible(1e-6, 0.0, 0.1)
    assert reason(1e6, classes=None, most=math.inf) is None
    assert reason(math.nan).why == reason(math.nan, classes=None, most=math.inf).why == "the log evidence is not a number"


def test_labels_that_are_explained_by_nothing_have_failed():
    assert reason(log_likelihood=-9 * LN4, gamma=0.49) == Saturated(0.49, pytest.approx(0.91), 0.1)
    assert reason(log_likelihood=-9 * LN4, gamma=0.51) is None, "enough effective parameters"
    assert reason(log_likelihood=-11 * LN4, gamma=0.1) is None, "labels are not explained"
    assert reason(log_likelihood=-0.0, gamma=0.0) == Saturated(0.0, 1.0, 0.1)
    for classes in (None, 0, 1):
        assert reason(log_likelihood=-0.0, gamma=0.0, classes=classes, most=math.inf) is None


def logistic(samples, learned):
    """One weight that separates two classes, at its mode; its precision is 1, or learned by closed-form steps."""
    weight = delta = 1.0
    for _ in range(100):
        for _ in range(30):  # Newton steps on log p(w | D), which is concave
            p = 1 / (1 + math.exp(-weight))
            curvature = samples * p * (1 - p)
            weight += (samples * (1 - p) - delta * weight) / (curvature + delta)
        delta = curvature / (curvature + delta) / weight**2 if learned else delta
    model, y = nn.Linear(1, 1, bias=False).double(), torch.arange(samples) % 2
    nn.init.constant_(model.weight, weight)
    at = laplace.at(model, (2.0 * y[:, None].double() - 1, y), "bernoulli")
    return at, Prior(at.names, delta), delta


@pytest.mark.parametrize("samples", [4, 100, 10_000])
@pytest.mark.parametrize("learned", [False, True])
@torch.no_grad()
def test_a_mode_with_certain_labels_is_not_said_to_have_failed(samples, learned):
    """However many samples one parameter explains: by quadrature, Laplace is about right there."""
    at, prior, delta = logistic(samples, learned)
    w = torch.linspace(-100, 100, 400_001, dtype=torch.float64)
    logs = samples * F.logsigmoid(w) - delta * w.square() / 2 + math.log(delta / (2 * math.pi)) / 2
    exact = float(torch.logsumexp(logs, 0) + (w[1] - w[0]).log())
    record, gamma = at(prior), float(at.effective_parameters(prior).sum())
    assert exact <= record.most == pytest.approx(-math.log(2))
    assert float(record.log_evidence) == pytest.approx(exact, abs=0.5)
    assert possible.failure(at, prior) is None
    if samples > 4:
        assert 0.7 < gamma < 1


def test_a_saturated_softmax_has_failed_where_no_bound_is_known_too():
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 30.0)
    y = torch.arange(100) % 2
    at = laplace.at(Changed(lambda f: f + 1e-3, model), (2.0 * y[:, None].double() - 1, y), "bernoulli")
    found = possible.failure(at, Prior(at.names, 1e-2))
    assert isinstance(found, Saturated)
    assert found.explained == pytest.approx(1)
    assert found.effective_parameters < 1e-6


@pytest.fixture(scope="module")
def failed():
    return certain()


def test_a_fit_whose_evidence_cannot_be(failed):
    fit, data = failed
    found = possible.failure(fit.estimate, fit.prior)
    assert found == Impossible(pytest.approx(float(fit.evidence.log_evidence)), pytest.approx(-math.log(2)))
    assert not fit.evidence.possible
    assert "it cannot be more than -0.693, so the approximation has failed" in str(fit.evidence)
    assert "which cannot be: at most -0.69" in repr(fit)
    at = kernel.at(fit.model, data)
    assert isinstance(possible.failure(at, fit.prior), Impossible)


def test_the_rate_that_the_caution_names_helps(failed):
    (caution,) = failed[0].symmetry().cautions
    assert isinstance(caution, Impossible)
    assert "Try a smaller learning rate (lr=0.1 for 0.3)." in str(caution)
    fit, _ = certain(lr=0.1)
    assert possible.failure(fit.estimate, fit.prior) is None
    assert fit.evidence.possible
    assert "cannot be" not in str(fit.evidence) + repr(fit)
    assert (fit.model(columns()[0]).argmax(1) == columns()[1]).all()


def test_it_needs_no_data(failed, monkeypatch):
    fit, _ = failed
    monkeypatch.setattr(nn.Module, "__call__", lambda *_: pytest.fail("the model was called"))
    possible.failure(fit.estimate, fit.prior)


def test_records_without_a_bound_are_possible():
    assert Evidence(torch.tensor(1e9), torch.tensor(0.0), torch.tensor(0.0), 3).possible
