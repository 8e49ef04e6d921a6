import itertools
import math

import pytest
import torch
from laplace import Laplace as TheirLaplace
from laplace.curvature import AsdlGGN, CurvlinopsGGN
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, SubsetRandomSampler, TensorDataset

import autosym
import oracles
from autosym import Categorical, Gaussian, Prior, log_evidence
from autosym.curvature.kronecker import kfac
from autosym.evidence import laplace
from autosym.nn import layers
from models import convnet, draw, mlp, relaxed

# ---- closed forms


@pytest.mark.parametrize("features", ["random", "fewer samples than features"])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize(("precision", "sigma"), [(1.0, 1.0), (0.2, 0.5), (30.0, 2.0)])
def test_bayesian_linear_regression(precision, sigma, outputs, features):
    """The constant is a feature, the weights are at the mode: Laplace is exact."""
    samples, size = (20, 4) if features == "random" else (4, 9)
    phi = torch.cat([torch.randn(samples, size - 1), torch.ones(samples, 1)], 1).double()
    y = torch.randn(samples, outputs, dtype=torch.float64)
    model = nn.Linear(size, outputs, bias=False).double()
    mode = torch.linalg.solve(phi.T @ phi / sigma**2 + precision * torch.eye(size), phi.T @ y / sigma**2).T
    model.weight.data = mode.contiguous()
    found = log_evidence(model, (phi, y), Gaussian(sigma), precision)
    assert abs(found - oracles.regression_log_evidence(phi, y, precision, sigma)) < 1e-8
    model.weight.data = mode + 0.1
    assert log_evidence(model, (phi, y), Gaussian(sigma), precision) < found - 1e-3, "away from the mode it is smaller"


def test_bayesian_linear_regression_of_one_number_by_hand():
    """One sample x = 2, y = 3 with unit noise and prior: y ~ N(0, 5)."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 2 * 3 / 5)
    found = log_evidence(model, (torch.tensor([[2.0]]), torch.tensor([[3.0]])), "gaussian")
    assert found == pytest.approx(-0.5 * (9 / 5 + math.log(2 * math.pi * 5)), abs=1e-10)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_evidence_is_equation_9_on_dense_matrices(likelihood):
    model, data = relaxed(), draw(likelihood, 6, (2, 4, 4))
    kind = Categorical() if likelihood == "categorical" else Gaussian(0.7)
    found = laplace.at(model, data, kind)
    prior = Prior(found.names, {name: 0.1 * (i + 1) for i, name in enumerate(found.names)})
    f, scale = model(data[0]).detach(), float(kind.scale().detach())
    if likelihood == "categorical":
        value = torch.distributions.Categorical(logits=f).log_prob(data[1]).sum()
    else:
        value = torch.distributions.Normal(f, 0.7).log_prob(data[1]).sum()
    curvature, gammas = kfac(model, data, kind), []
    for name, delta in prior.precision().items():
        weight = model.get_submodule(name).weight.detach().flatten()
        value = value + torch.distributions.Normal(torch.zeros_like(weight), delta**-0.5).log_prob(weight).sum()
        gammas.append(0.0)
        for block in oracles.kron_blocks(curvature, name):
            hessian = scale * block
            eye = torch.eye(len(block), dtype=torch.float64)
            value = value + 0.5 * (len(block) * math.log(2 * math.pi) - torch.logdet(hessian + delta * eye))
            gammas[-1] += float(torch.trace(hessian @ torch.linalg.inv(hessian + delta * eye)))
    assert float(found(prior).log_evidence.detach()) == pytest.approx(float(value), abs=1e-8)
    assert found.effective_parameters(prior).tolist() == pytest.approx(gammas, abs=1e-8)
    assert len(set(prior.precision().values())) == len(gammas) > 10


# ---- a published library


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("backend", [CurvlinopsGGN, AsdlGGN])
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize("per_layer", [False, True], ids=["scalar", "per layer"])
@pytest.mark.parametrize(
    ("make", "shape"), [(lambda: mlp(5, 4, 3), (5,)), (lambda: convnet(), (2, 6, 5))], ids=["mlp", "convnet"]
)
def test_log_marginal_likelihood_equals_laplace_torch(make, shape, per_layer, likelihood, backend):
    torch.manual_seed(1)
    model, (x, y) = make(), draw(likelihood, 9, shape)
    sigma = 1.0 if likelihood == "categorical" else 0.6
    names = [name for name, _ in model.named_parameters()]
    precisions = torch.linspace(0.5, 4, len(names), dtype=torch.float64) if per_layer else torch.tensor(2.5)
    ours = dict(zip(names, precisions.tolist(), strict=True)) if per_layer else 2.5
    kind = Categorical() if likelihood == "categorical" else Gaussian(sigma)
    found = log_evidence(model, (x, y), kind, ours, expand_bias=True)

    task = "classification" if likelihood == "categorical" else "regression"
    options = {"subset_of_weights": "all", "hessian_structure": "kron", "backend": backend}
    theirs = TheirLaplace(model, task, prior_precision=precisions, sigma_noise=sigma, **options)
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
    assert found == pytest.approx(float(theirs.log_marginal_likelihood().detach()), rel=1e-9)
    if len(shape) > 1:
        exact_bias = log_evidence(model, (x, y), kind, ours)
        assert abs(found - exact_bias) > 1e-3, "the bias variants would not be told apart"


# ---- the cheap function of the prior


def differentiable(likelihood, sigma=0.7):
    kind = Categorical() if likelihood == "categorical" else Gaussian(sigma)
    found = laplace.at(relaxed(), draw(likelihood, 5, (2, 4, 4)), kind)
    return found, Prior(found.names, {name: 0.3 + 0.2 * i for i, name in enumerate(found.names)})


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_gradient_in_the_prior_agrees_with_finite_differences(likelihood):
    found, prior = differentiable(likelihood)

    def value(log_precision):
        prior.log_precision = log_precision
        return found(prior).log_evidence

    start = prior.log_precision.detach().clone()
    del prior.log_precision
    assert torch.autograd.gradcheck(value, start.requires_grad_())


def test_gradient_in_the_noise_agrees_with_finite_differences():
    found, prior = differentiable("gaussian")

    def value(log_variance):
        found.likelihood.log_variance = log_variance
        return found(prior).log_evidence

    start = found.likelihood.log_variance.detach().clone()
    del found.likelihood.log_variance
    assert torch.autograd.gradcheck(value, start.requires_grad_())


def test_one_pass_serves_every_noise():
    found, prior = differentiable("gaussian", sigma=0.7)
    torch.manual_seed(0)
    other, _ = differentiable("gaussian", sigma=2.0)
    found.likelihood.log_variance.data.fill_(2 * math.log(2.0))
    assert float(found(prior).log_evidence.detach()) == pytest.approx(float(other(prior).log_evidence.detach()), abs=1e-9)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_gradient_is_mackays(likelihood):
    """d log evidence / d log delta = (gamma - delta |w|^2) / 2: zero exactly at MacKay's step."""
    found, prior = differentiable(likelihood)
    found(prior).log_evidence.backward()
    gamma = found.effective_parameters(prior).detach()
    expected = (gamma - prior.log_precision.detach().exp() * found.square_norms) / 2
    torch.testing.assert_close(prior.log_precision.grad, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_effective_parameters_lie_between_none_and_all(likelihood):
    found, _ = differentiable(likelihood)
    for precision, low, high in ((1e-12, 0.0, 1.0), (1.0, 0.0, 1.0), (1e12, 0.0, 1e-6)):
        share = found.effective_parameters(Prior(found.names, precision)) / found.sizes
        assert share.min() >= low
        assert share.max() <= high
    gammas = [found.effective_parameters(Prior(found.names, precision)) for precision in (0.1, 1.0, 10.0)]
    assert (gammas[0] > gammas[1]).all()
    assert (gammas[1] > gammas[2]).all()


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_the_record_adds_up(likelihood):
    found, prior = differentiable(likelihood)
    record = found(prior)
    total = record.log_likelihood + record.log_prior - record.complexity
    assert float(record.log_evidence.detach()) == pytest.approx(float(total.detach()), abs=1e-12)
    assert record.occam < 0
    assert record.samples == 5
    assert record.bound_of is None
    log_prior = prior.log_density(found.square_norms, found.sizes)
    assert log_prior.shape == (len(found.names),)
    assert float(record.log_prior.detach()) == pytest.approx(float(log_prior.sum().detach()), abs=1e-10)
    for number in (record.log_evidence, record.log_likelihood, record.occam):
        assert f"{float(number.detach()):.1f}" in str(record)
    assert "5 samples" in str(record)


def test_squared_norms_and_sizes_are_those_of_the_paths():
    model = relaxed()
    found = laplace.at(model, draw("categorical", 4, (2, 4, 4)))
    weights = [model.get_submodule(name).weight.detach() for name in found.names]
    assert found.sizes.tolist() == [weight.numel() for weight in weights]
    assert found.square_norms.tolist() == pytest.approx([float(weight.square().sum()) for weight in weights])
    assert found.sizes.sum() == sum(parameter.numel() for parameter in model.parameters())
    assert [lam.numel() * mu.shape[1] for lam, mu in found.eigenvalues] == found.sizes.tolist()


def test_a_prior_over_other_paths_is_refused():
    found, _ = differentiable("categorical")
    with pytest.raises(ValueError, match=r"this prior is over .*'0.weight'"):
        found(Prior(["0.weight"]))
    with pytest.raises(ValueError, match="this prior is over"):
        found.effective_parameters(Prior(reversed(found.names)))


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        (0.0, "prior precision must be positive and finite, got .*0.weight"),
        (-1.0, "positive and finite"),
        (math.nan, "positive and finite"),
        ({"0.weight": 1.0}, "prior_precision must name every path and no other; wrong: 0.bias, 2.bias, 2.weight"),
        ({"0.weight": 1.0, "0.bias": 1, "2.weight": 1, "2.bias": 1, "spam": 1}, "wrong: spam"),
    ],
    ids=["zero", "negative", "nan", "missing", "unknown"],
)
def test_wrong_prior_precisions_are_named(precision, message):
    with pytest.raises(ValueError, match=message):
        log_evidence(mlp(5, 4, 3), draw("categorical", 5), prior_precision=precision)


def test_prior_knows_its_precisions():
    assert Prior(["a", "b"], {"b": 2.0, "a": 0.5}).precision() == pytest.approx({"a": 0.5, "b": 2.0})


# ---- one call for newcomers


class Unsized(IterableDataset):
    def __init__(self, x, y):
        self.pairs = list(zip(x, y, strict=True))

    def __iter__(self):
        return iter(self.pairs)


DATA = {
    "dataset": lambda x, y: TensorDataset(x, y),
    "list of two tensors": lambda x, y: [x, y],
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), 4),
    "shuffled loader": lambda x, y: DataLoader(TensorDataset(x, y), 4, shuffle=True),
    "loader with a sampler": lambda x, y: DataLoader(TensorDataset(x, y), 4, sampler=SequentialSampler(x)),
    "loader of one batch": lambda x, y: DataLoader(TensorDataset(x, y), 100),
    "drop_last that drops nothing": lambda x, y: DataLoader(TensorDataset(x, y), 5, drop_last=True),
    "dataset without tensors": lambda x, y: torch.utils.data.Subset(TensorDataset(x, y), range(len(x))),
    "list of batches": lambda x, y: [(x[:7], y[:7]), (x[7:], y[7:])],
    "generator": lambda x, y: ((x[i : i + 1], y[i : i + 1]) for i in range(len(x))),
    "iterable dataset": lambda x, y: Unsized(x, y),
}


@pytest.mark.parametrize("kind", DATA)
def test_log_evidence_takes_any_data(kind):
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 20)
    expected = log_evidence(model, (x, y))
    assert isinstance(expected, float)
    assert log_evidence(model, DATA[kind](x, y), batch_size=3) == pytest.approx(expected, abs=1e-10)
    assert log_evidence(model, (x[1:], y[1:])) != pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("batch_size", [1, 3, 20])
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_log_evidence_is_the_same_for_any_batch_size_and_order(likelihood, batch_size):
    model, (x, y) = relaxed(), draw(likelihood, 20, (2, 4, 4))
    order = torch.randperm(20)
    expected = log_evidence(model, (x, y), likelihood)
    assert log_evidence(model, (x[order], y[order]), likelihood, batch_size=batch_size) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_log_evidence_of_our_layers_equals_that_of_torchs(likelihood):
    theirs, (x, y) = mlp(5, 4, 3), draw(likelihood, 9)
    ours = nn.Sequential(layers.fc((5,), (4,)), nn.Tanh(), layers.fc((4,), (3,))).double()
    for parameter, own in zip(theirs.parameters(), ours.parameters(), strict=True):
        own.data = parameter.detach().reshape(own.shape)
    assert log_evidence(ours, (x, y), likelihood) == pytest.approx(log_evidence(theirs, (x, y), likelihood), abs=1e-10)


def test_log_evidence_in_float32_is_close():
    model, (x, y) = convnet(), draw("categorical", 12, (2, 6, 5))
    exact = log_evidence(model, (x, y))
    assert log_evidence(model.float(), (x.float(), y)) == pytest.approx(exact, rel=1e-4)


def test_log_evidence_by_sampling_and_by_subset_is_near():
    model, data = mlp(5, 4, 3), draw("categorical", 400)
    exact = log_evidence(model, data)
    for options in ({"sampled": True}, {"subset": 200}, {"share_blocks": True}):
        assert log_evidence(model, data, **options) == pytest.approx(exact, abs=3)


def test_log_evidence_prefers_the_model_that_the_data_follow():
    """Of two features, one of which makes the targets, the evidence chooses the right one."""
    x = torch.randn(100, 2, dtype=torch.float64)
    y = 2 * x[:, :1] + 0.1 * torch.randn(100, 1)
    values = []
    for column in range(2):
        phi = x[:, column : column + 1]
        model = nn.Linear(1, 1, bias=False).double()
        model.weight.data = torch.linalg.lstsq(phi, y).solution.T
        values.append(log_evidence(model, (phi, y), Gaussian(0.1)))
    assert values[0] > values[1] + 100


# ---- samples that are not shown


@pytest.mark.fault(6)
@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (lambda data: DataLoader(data, 8, drop_last=True), "the loader has drop_last=True, so samples will be missing"),
        (lambda data: DataLoader(data, 8, sampler=SubsetRandomSampler(range(16))), "the loader showed 16 of the 20 samples"),
    ],
    ids=["drop_last", "sampler"],
)
def test_a_loader_that_shows_less_is_refused_or_counted(loader, reason):
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 20)
    data = loader(TensorDataset(x, y))
    with pytest.raises(ValueError, match=rf"{reason}.*drop_last=False.* allow_partial=True"):
        log_evidence(model, data)
    found = laplace.at(model, data, allow_partial=True)
    assert found.samples == 16
    assert found(Prior(found.names)).samples == 16
    expected = log_evidence(model, (x[:16], y[:16]))
    assert log_evidence(model, data, allow_partial=True) == pytest.approx(expected, abs=1e-10)


def test_the_package_offers_its_names():
    assert all(hasattr(autosym, name) for name in autosym.__all__)
    assert autosym.log_evidence is log_evidence


@pytest.mark.parametrize("sigma_noise", [0.003, 0.1, 2.0])
@pytest.mark.parametrize("width", [2, 16])
def test_closed_form_steps_with_noise_climb_to_what_gradients_find(sigma_noise, width):
    """Full steps swung between two ends, or settled hundreds of nats below: less noise means more effective parameters, and back."""
    torch.manual_seed(0)
    x = torch.randn(60, 8).double()
    y = (x[:, :1] * x[:, 1:2]).tanh() + 0.05 * torch.randn(60, 1).double()
    net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)).double()
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(200):
        optimiser.zero_grad()
        (net(x) - y).square().mean().backward()
        optimiser.step()

    at = laplace.at(net, (x, y), autosym.Gaussian(sigma_noise))
    prior = autosym.Prior(at.names)
    values = [float(at(prior).log_evidence.detach())]
    for _ in range(100):
        at.mackay(prior)
        values.append(float(at(prior).log_evidence.detach()))
    assert all(after >= before for before, after in itertools.pairwise(values))
    assert values[20] > values[-1] - 1, "few steps are enough"
    optimiser = torch.optim.Adam([*prior.parameters(), at.likelihood.log_variance], 0.02)
    for _ in range(500):
        optimiser.zero_grad()
        (-at(prior).log_evidence).backward()
        optimiser.step()
    assert float(at(prior).log_evidence.detach()) == pytest.approx(values[-1], abs=0.05)
