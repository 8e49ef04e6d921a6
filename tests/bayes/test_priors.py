import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

import oracles
from autosym import Gaussian, Prior, fit
from autosym.curvature.kronecker import kfac
from autosym.evidence import laplace
from autosym.evidence.predictive import predictive
from autosym.nn import layers, nets
from models import draw, mlp, randomised

SIGMA = 0.5


def regression(seed, size=4, outputs=1, spread=1.0):
    torch.manual_seed(seed)
    phi = torch.randn(20, size, dtype=torch.float64)
    truth = spread * torch.randn(size, outputs, dtype=torch.float64)
    return phi, phi @ truth + SIGMA * torch.randn(20, outputs, dtype=torch.float64)


def student_log_evidence(phi, y, delta, nu):
    """log of the integral over tau of Gamma(tau; nu/2, nu/2) N(y | 0, Phi Phi^T / (delta tau) + sigma^2 I), by quadrature in log tau."""
    log_tau = torch.linspace(-14, 8, 1001, dtype=torch.float64)
    gamma = torch.distributions.Gamma(torch.tensor(nu / 2).double(), torch.tensor(nu / 2).double())
    values = []
    for t in log_tau:
        evidence = oracles.regression_log_evidence(phi, y, delta * math.exp(t), SIGMA)
        values.append(evidence + float(gamma.log_prob(t.exp())) + float(t))
    return float(torch.logsumexp(torch.tensor(values), 0)) + math.log(float(log_tau[1] - log_tau[0]))


def at_the_mode(phi, y, delta, nu, rounds=30):
    """Laplace evidence and prior after alternating between weights and scales until both rest."""
    model = nn.Linear(phi.shape[1], y.shape[1], bias=False).double()
    prior, tau = Prior(["weight"], delta, nu), torch.ones(y.shape[1], dtype=torch.float64)
    for _ in range(rounds):
        for o in range(y.shape[1]):
            precision = phi.T @ phi / SIGMA**2 + delta * tau[o] * torch.eye(phi.shape[1])
            model.weight.data[o] = torch.linalg.solve(precision, phi.T @ y[:, o] / SIGMA**2)
        found = laplace.at(model, (phi, y), Gaussian(SIGMA)).with_scales(prior, 20)
        tau = prior.scales["weight"][0]
    return found, prior, model


# ---- the bound


@pytest.mark.parametrize("nu", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("seed", range(4))
def test_student_bound_is_below_the_evidence_by_quadrature_and_close(seed, nu):
    """Measured gaps: at most 0.022 (nu = 1), 0.013 (nu = 3) and 0.006 nats (nu = 10)."""
    phi, y = regression(seed, spread=(0.2, 1.0, 3.0, 10.0)[seed])
    exact = student_log_evidence(phi, y, 1.0, nu)
    found, prior, _ = at_the_mode(phi, y, 1.0, nu)
    record = found(prior)
    value = float(record.log_evidence.detach())
    assert record.bound_of == "the Laplace evidence under a Student-t prior"
    assert value < exact + 1e-6
    assert exact - value < 0.05
    gaussian = oracles.regression_log_evidence(phi, y, 1.0, SIGMA)
    if seed == 3:
        assert value > gaussian + 1, "heavy tails welcome large weights"


@pytest.mark.parametrize("seed", range(4))
def test_student_bound_is_never_above_wherever_the_weights_are(seed):
    phi, y = regression(seed)
    exact = student_log_evidence(phi, y, 1.0, 3.0)
    model = nn.Linear(4, 1, bias=False).double()
    for scale in (0.0, 0.5, 1.0, 2.0):
        model.weight.data = scale * torch.linalg.lstsq(phi, y).solution.T.contiguous()
        for iterations in (1, 3):
            prior = Prior(["weight"], 1.0, 3.0)
            found = laplace.at(model, (phi, y), Gaussian(SIGMA)).with_scales(prior, iterations)
            assert float(found(prior).log_evidence.detach()) < exact + 1e-6


def test_student_bound_of_several_rows_is_the_sum_of_theirs():
    phi, y = regression(0, outputs=3, spread=2.0)
    found, prior, _ = at_the_mode(phi, y, 0.7, 3.0)
    single = 0.0
    for o in range(3):
        one, own, _ = at_the_mode(phi, y[:, o : o + 1], 0.7, 3.0)
        single += float(one(own).log_evidence.detach())
    assert float(found(prior).log_evidence.detach()) == pytest.approx(single, abs=1e-6)


def test_many_degrees_of_freedom_are_a_gaussian():
    phi, y = regression(0, outputs=2)
    found, prior, _ = at_the_mode(phi, y, 0.7, 1e6)
    assert float(found(prior).log_evidence.detach()) == pytest.approx(
        oracles.regression_log_evidence(phi, y, 0.7, SIGMA), abs=1e-3
    )
    assert prior.scales["weight"].sub(1).abs().max() < 1e-4
    gaussian = laplace.at(nn.Linear(4, 2, bias=False).double(), (phi, y), Gaussian(SIGMA))
    assert gaussian(Prior(["weight"])).bound_of is None


def test_steps_for_the_scales_raise_the_bound():
    model, data = mlp(5, 4, 3), draw("categorical", 20)
    found = laplace.at(model, data)
    values = []
    for iterations in (1, 2, 5, 20):
        prior = Prior(found.names, 0.5, 3.0)
        values.append(float(found.with_scales(prior, iterations)(prior).log_evidence.detach()))
    assert values == sorted(values)
    assert values[-1] > values[0]
    prior = Prior(found.names, 0.5, 3.0)
    for _ in range(20):  # scales are kept in the prior: the next steps go on from there
        again = found.with_scales(prior, 1)
    assert float(again(prior).log_evidence.detach()) == pytest.approx(values[-1], abs=1e-9)


def test_evidence_with_scales_is_equation_9_on_dense_matrices():
    """H = kron(G, A) / sigma^2 + delta diag(tau) for every block, and the prior's density of each row."""
    model = randomised(nets.build("f-fc+gconv:c2", (1, 4, 4), 3, 1, channels=(1, 2), strides=(1, 2), hidden=2))
    data = draw("gaussian", 6, (1, 4, 4))
    found = laplace.at(model, data, Gaussian(0.7))
    prior = Prior(found.names, {name: 0.1 * (i + 1) for i, name in enumerate(found.names)}, 3.0)
    scaled = found.with_scales(prior)
    value = torch.distributions.Normal(model(data[0]).detach(), 0.7).log_prob(data[1]).sum()
    for name, delta in prior.precision().items():
        weight, tau = model.get_submodule(name).weight.detach(), prior.scales[name]
        assert tau.shape == weight.shape[:2]
        value += torch.distributions.Normal(0.0, (delta * tau[..., None].expand(weight.shape)).rsqrt()).log_prob(weight).sum()
        for block, scales in zip(oracles.kron_blocks(found.curvature, name), tau, strict=True):
            hessian = block / 0.49 + delta * torch.diag(scales.repeat_interleave(weight.shape[2]))
            value += 0.5 * (len(block) * math.log(2 * math.pi) - torch.logdet(hessian))
    expected = float(value) + prior.mixture_bound
    assert float(scaled(prior).log_evidence.detach()) == pytest.approx(expected, abs=1e-7)


# ---- scales


def test_scales_are_smaller_for_rows_with_large_weights():
    model, data = mlp(5, 4, 3), draw("categorical", 20)
    model[0].weight.data *= torch.tensor([0.1, 1.0, 5.0, 20.0])[:, None]
    prior = Prior(laplace.at(model, data).names, 1.0, 3.0)
    laplace.at(model, data).with_scales(prior)
    tau = prior.scales["0.weight"][0]
    assert (tau.diff() < 0).all()
    assert tau[-1] < 0.05


def test_scales_are_by_their_formula():
    prior = Prior(["a"], 2.0, nu=5.0)
    square = torch.tensor([[0.0, 1.0, 9.0]], dtype=torch.float64)
    bound = prior.set_scales("a", square, width=4)
    a, b = (5 + 4) / 2, (5 + 2 * square) / 2
    torch.testing.assert_close(prior.scales["a"], a / b)
    draws = torch.distributions.Gamma(torch.full_like(b, a), b).sample((200_000,))
    q = torch.distributions.Gamma(torch.full_like(b, a), b).log_prob(draws)
    p = torch.distributions.Gamma(torch.tensor(2.5), torch.tensor(2.5)).log_prob(draws)
    estimate = (2.0 * (draws.log() - (a / b).log()) + p - q).sum(-1).mean()  # width / 2 = 2
    assert bound == pytest.approx(float(estimate), abs=0.02)
    assert bound < 0


@pytest.mark.parametrize(
    ("scales", "weight", "expected"),
    [
        ((2, 3), (2, 3, 5), (2, 3, 1)),
        ((1, 3), (3, 5), (3, 1)),
        ((1, 4), (4, 2, 3, 3), (4, 1, 1, 1)),
        ((2, 2), (4, 1, 3, 3), (4, 1, 1, 1)),
        ((1, 3), (1, 3, 1), (1, 3, 1)),
        ((1, 3), (3,), (3,)),
        ((1, 1), (), ()),
    ],
    ids=str,
)
def test_scales_broadcast_against_weights_whose_leading_axes_are_rows(scales, weight, expected):
    prior = Prior(["a"], nu=4.0)
    assert prior.scale_of("a", torch.zeros(weight)) == 1.0
    prior.set_scales("a", torch.rand(scales, dtype=torch.float64), 7)
    found = prior.scale_of("a", torch.zeros(weight))
    assert found.shape == expected
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.flatten().double(), prior.scales["a"].flatten(), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        (torch.ones(weight) * found).reshape(*scales, -1)[..., 0].double(), prior.scales["a"], rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("nu", [0, -1.0, math.nan])
def test_degrees_of_freedom_are_checked(nu):
    with pytest.raises(ValueError, match="nu, the degrees of freedom of a Student-t prior, must be positive"):
        Prior(["a"], nu=nu)
    with pytest.raises(ValueError, match="nu, the degrees of freedom"):
        fit(mlp(5, 4, 3), draw("categorical", 10), nu=nu, epochs=4)


# ---- what follows


@pytest.mark.parametrize("scaled", [True, False], ids=["student", "gaussian"])
def test_predictive_with_scales_equals_the_dense_one(scaled):
    model = randomised(nn.Sequential(layers.Factored((2, 2, 3), (3, 1, 2)), nn.Tanh(), layers.fc((3, 1, 2), (2,))))
    x, y = draw("gaussian", 9, (2, 2, 3), 2)
    likelihood = Gaussian(0.6)
    found = laplace.at(model, (x, y), likelihood)
    prior = Prior(found.names, {name: 0.3 * (i + 1) for i, name in enumerate(found.names)}, 3.0 if scaled else math.inf)
    if scaled:
        found = found.with_scales(prior)
    new = torch.randn(4, 2, 2, 3, dtype=torch.float64)
    eigenvectors = found.curvature.eigenvectors(prior.scales)
    result = predictive(model, new, eigenvectors, prior, likelihood)
    expected = torch.zeros(4, 2, 2, dtype=torch.float64)
    curvature = kfac(model, (x, y), likelihood)
    for name, delta in prior.precision().items():
        weight = model.get_submodule(name).weight.detach()
        jacobian = jacrev(lambda w, name=name: functional_call(model, {f"{name}.weight": w}, (new,)))(weight)
        jacobian = jacobian.detach().reshape(4, 2, len(weight), -1)
        tau = prior.scales.get(name, torch.ones(weight.shape[:2], dtype=torch.float64))
        for k, block in enumerate(oracles.kron_blocks(curvature, name)):
            precision = block / 0.36 + delta * torch.diag(tau[k].repeat_interleave(weight.shape[2]))
            expected += jacobian[:, :, k] @ torch.linalg.inv(precision) @ jacobian[:, :, k].mT
    torch.testing.assert_close(result.covariance, expected, rtol=1e-8, atol=1e-8)
    assert bool(prior.scales) == scaled


def test_fit_with_a_student_prior():
    def run(nu):
        torch.manual_seed(0)
        net = nets.build("f-fc+conv", (1, 4, 4), 2, 2, channels=(1, 2), strides=(1, 2), hidden=2)
        x = torch.randn(60, 1, 4, 4)
        return fit(net, (x, (x[:, 0, 0].sum(1) > 0).long()), nu=nu, epochs=10, batch_size=20), x

    (student, x), (gaussian, _) = run(4.0), run(math.inf)
    assert student.evidence.bound_of == "the Laplace evidence under a Student-t prior"
    assert gaussian.evidence.bound_of is None
    assert set(student.prior.scales) == set(student.prior.names)
    assert not gaussian.prior.scales
    assert math.isfinite(student.evidence.log_evidence)
    assert any(tau.std() > 1e-3 for tau in student.prior.scales.values() if tau.numel() > 1)
    assert any(not torch.equal(a, b) for a, b in zip(student.model.parameters(), gaussian.model.parameters(), strict=True))
    assert torch.isfinite(student.predictive(x[:3]).probabilities).all()
