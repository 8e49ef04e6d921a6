"""Evidence of the whole network by every route, against the dense Gauss-Newton matrix by torch.func."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import oracles
import workers
from autosym import Prior
from autosym.curvature.gauss_newton import GaussNewton
from autosym.curvature.krylov import solve
from autosym.evidence import factorised, laplace, probes, rows, whitened, whole
from autosym.evidence.whitened import Preconditioned
from autosym.nn import nets
from factories import LIKELIHOODS
from models import convnet, mlp, owned, randomised, small

CASES = [case.values[0] for case in LIKELIHOODS]
ROUTES = ("weights", "rows", "probes")
NETS = ("conv", "f-fc", "fc", "s-fc", "s-conv", "gconv:c4", "f-fc+conv")
TORCH = {"mlp": lambda outputs: (mlp(5, 4, outputs), (5,)), "convolutions": lambda _: (convnet(), (2, 6, 5))}
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
few = settings(max_examples=8, deadline=None, derandomize=True, database=None)


def omega(outputs):
    net = nets.build("s-conv", (2, 4, 4), outputs, 2, channels=(1, 2), strides=(1, 2), hidden=2, prior="omega")
    return net.double(), (2, 4, 4)


def made(name, outputs):
    """A network, and the shape of its inputs."""
    if name == "omega":
        return omega(outputs)
    return TORCH[name](outputs) if name in TORCH else (randomised(small(name, outputs)), (2, 4, 4))


def problem(name="f-fc+conv", case=CASES[0], samples=12, seed=0):
    torch.manual_seed(seed)
    model, shape = made(name, case.outputs)
    x = torch.randn(samples, *shape, dtype=torch.float64)
    data = x, case.draw(model(x).detach())
    at = laplace.at(model, data, case.make())
    return model, data, at, Prior(at.names, {n: math.exp(math.cos(seed + i)) for i, n in enumerate(at.names)})


def dense(model, data, at, prior, case):
    """The evidence, and the effective parameters of every path, by one matrix of all weights that are not left out."""
    counted = [(name, full) for name, full in owned(model) if name not in at.left_out]
    H = oracles.whole_ggn(model, [full for _, full in counted], *data, case.log_prob)
    parameters, precision = dict(model.named_parameters()), prior.precision()
    w = [parameters[full].detach().flatten() for _, full in counted]
    delta = torch.cat([torch.full_like(part, precision[name]) for (name, _), part in zip(counted, w, strict=True)])
    log_prior = 0.5 * (delta.log() - delta * torch.cat(w).square()).sum()
    value = case.log_prob(model(data[0]).detach(), data[1]) + log_prior - 0.5 * torch.linalg.slogdet(H + delta.diag())[1]
    spent = (torch.linalg.inv(H + delta.diag()) @ H).diagonal().split([len(part) for part in w])
    gamma = {name: part.sum() for (name, _), part in zip(counted, spent, strict=True)}
    return value, torch.stack([gamma.get(name, H.new_zeros(())) for name in prior.names])


@pytest.mark.parametrize("case", LIKELIHOODS)
@pytest.mark.parametrize("name", [*NETS, "omega", "mlp"])
def test_whole_evidence_is_the_dense_one_by_weights_and_by_rows(name, case):
    model, data, at, prior = problem(name, case)
    value, gamma = dense(model, data, at, prior, case)
    for how in ("weights", "rows"):
        found = whole.at(model, data, at, prior, how=how)
        assert_close(found.evidence.log_evidence.detach(), value, **CLOSE)
        assert_close(found.gamma, gamma, **CLOSE)
        assert found.evidence.standard_error == found.truncation == 0
    assert abs(float(at(prior).log_evidence.detach() - value)) > 1e-3, "Kronecker factors are another number"


@few
@given(name=st.sampled_from([*NETS, "omega", "mlp"]), case=st.sampled_from(CASES), seed=st.integers(0, 10**6))
def test_whole_evidence_by_any_route_whatever_the_prior(name, case, seed):
    model, data, at, prior = problem(name, case, samples=6, seed=seed)
    value, gamma = dense(model, data, at, prior, case)
    by_weights, by_rows = (whole.at(model, data, at, prior, how=how) for how in ("weights", "rows"))
    assert_close(by_weights.evidence.log_evidence.detach(), value, **CLOSE)
    assert_close(by_rows.gamma, gamma, **CLOSE)
    found = whole.at(model, data, at, prior, how="probes")
    error = float(found.evidence.log_evidence.detach() - value)
    assert abs(error) <= 4 * found.evidence.standard_error + found.truncation + 1e-6
    assert found.probes >= probes.AT_ONCE
    assert found.steps > 0


def test_whole_evidence_is_printed_as_such():
    """Beside that of Kronecker factors, in the same words, it looked like a gain of hundreds of nats."""
    torch.manual_seed(0)
    net, data = nn.Linear(3, 2), (torch.randn(8, 3), torch.arange(8) % 2)
    at = laplace.at(net, data)
    prior = Prior(at.names)
    assert str(at(prior)).startswith("log evidence -")
    assert str(whole.at(net, data, at, prior).evidence).startswith("log evidence of the whole network -")


def test_whole_evidence_of_torch_convolutions():
    case = CASES[0]
    model, data, at, prior = problem("convolutions", case)
    value, gamma = dense(model, data, at, prior, case)
    for how in ("weights", "rows"):
        found = whole.at(model, data, at, prior, how=how)
        assert_close(found.evidence.log_evidence.detach(), value, **CLOSE)
        assert_close(found.gamma, gamma, **CLOSE)


def few_rows(monkeypatch, count):
    """So many rows in the preconditioner, at most, whatever the network: of all rows it is nearly the inverse."""
    monkeypatch.setattr(whitened, "ROWS", count)
    monkeypatch.setattr(whitened, "DENSE", 0)


def prepared(model, data, at, prior):
    return whitened.prepared(GaussNewton(model, data, at.likelihood), at, prior.precision(), None)


@pytest.mark.parametrize("count", [0, 9, 10**4])
@pytest.mark.parametrize("case", [LIKELIHOODS[0], LIKELIHOODS[1]])
def test_whole_evidence_of_many_probes_has_no_bias(case, count, monkeypatch):
    few_rows(monkeypatch, count)
    model, data, at, prior = problem("f-fc+conv", case, samples=20)
    value, gamma = dense(model, data, at, prior, case)
    matrix = prepared(model, data, at, prior)
    assert isinstance(matrix, Preconditioned) == (count > 0)
    z, A = matrix.probes(0, 0, 400), matrix(torch.eye(sum(matrix.H.sizes), dtype=torch.float64))
    found = solve(lambda v: v @ A, z, lambda _: False, 60)
    lower, upper = found.log_bracket(matrix.least)
    assert float((upper - lower).max()) < 1e-3
    constant = float(at(prior).log_evidence.detach() - value) + 0.5 * float(
        log_det(at, prior)
    )  # the dense log-determinant, halved
    truth = 2 * constant - matrix.log_det
    slope = found.log_slope()
    plain, better = upper, upper - slope * (found.forms - A.trace())
    for values, chances in ((plain, found.log_chances(0.0)), (better, found.log_chances(slope))):
        assert abs(float(values.mean()) - truth) < 4 * float(values.std()) / 20
        assert values.var() < 1.1 * chances.mean(), "the quadrature knows the variance, or more"
    assert better.std() < plain.std()
    gammas = matrix.gammas(z, found.x)
    assert ((gammas.mean(0) - gamma).abs() < 4 * gammas.std(0) / 20 + 1e-9).all()


def test_the_chance_of_a_probe_is_twice_the_square_of_the_logarithm():
    torch.manual_seed(0)
    root = torch.randn(30, 30, dtype=torch.float64)
    A = root @ root.mT + torch.eye(30, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(A)
    z = 2.0 * torch.randint(2, (4000, 30), dtype=torch.float64) - 1
    found = solve(lambda v: v @ A, z, lambda _: False, 30)
    for slope in (0.0, found.log_slope()):
        h = values.log() - slope * values
        full = (vectors * (h - h.mean())) @ vectors.mT
        assert float(found.log_chances(slope).mean()) == pytest.approx(2 * float(full.square().sum()), rel=0.05)
        drawn = torch.einsum("ki,ij,kj->k", z, full, z).var()
        off = 2 * float((full - full.diagonal().diag()).square().sum())
        assert float(drawn) == pytest.approx(off, rel=0.1)


def test_samples_in_the_preconditioner_save_products(monkeypatch):
    model, data, at, _ = problem("f-fc+conv", samples=200)
    prior = Prior(at.names, 0.1)
    exact, _ = dense(model, data, at, prior, CASES[0])
    found = {}
    for count in (0, 150):
        few_rows(monkeypatch, count)
        monkeypatch.setattr(whitened, "TRACE", 0)
        found[count] = whole.at(model, data, at, prior, how="probes", nats=0.5)
        error = float(found[count].evidence.log_evidence.detach() - exact)
        assert abs(error) <= 4 * found[count].evidence.standard_error + found[count].truncation
    assert found[150].steps <= found[0].steps
    assert found[150].evidence.standard_error < 0.8 * found[0].evidence.standard_error


def test_dense_layers_have_the_mean_of_a_probe_and_convolutions_samples_in_the_preconditioner(monkeypatch):
    torch.manual_seed(0)
    model, x = mlp(64, 64, 3), torch.randn(12, 64, dtype=torch.float64)
    data = x, torch.arange(12) % 3
    at = laplace.at(model, data)
    prior = Prior(at.names)
    assert not isinstance(prepared(model, data, at, prior), Preconditioned)
    monkeypatch.setattr(whitened, "TRACE", 0)
    assert isinstance(prepared(model, data, at, prior), Preconditioned), "where the mean costs too much"
    model, data, at, prior = problem("convolutions")
    assert isinstance(prepared(model, data, at, prior), Preconditioned)
    monkeypatch.setattr(whitened, "NUMBERS", 1)
    assert prepared(model, data, at, prior).mean(None) is None


@pytest.mark.parametrize("precision", [1e4, 1e12])
@pytest.mark.parametrize("count", [0, 9])
def test_whole_evidence_that_needs_no_second_step_has_no_error(precision, count, monkeypatch):
    few_rows(monkeypatch, count)
    model, data, at, _ = problem("f-fc+conv")
    prior = Prior(at.names, precision)
    value, _ = dense(model, data, at, prior, CASES[0])
    found = whole.at(model, data, at, prior, how="probes")
    assert found.probes == probes.AT_ONCE
    assert found.doubt < 1.0
    assert abs(float(found.evidence.log_evidence.detach() - value)) <= 3 * found.doubt + 1e-6


def test_what_few_steps_miss_is_part_of_the_truncation(monkeypatch):
    few_rows(monkeypatch, 12)
    model, data, at, _ = problem("f-fc+conv", samples=60)
    prior = Prior(at.names, 1e-2)
    exact, _ = dense(model, data, at, prior, CASES[0])
    inside = []
    for seed in range(20):
        found = whole.at(model, data, at, prior, how="probes", products=40, seed=seed)
        assert 0 < found.missed < 0.2 * found.truncation
        error = float(found.evidence.log_evidence.detach()) + found.missed - float(exact)
        inside.append(abs(error) <= 2 * found.doubt)
    assert sum(inside) >= 18


def log_det(at, prior):
    """log det (I + D^-1/2 H D^-1/2) by Kronecker factors."""
    precision = prior.precision()
    products = at.curvature.eigenvectors({})
    scale = at.likelihood.scale().detach()
    return sum((scale / precision[name] * products[name][0]).log1p().sum() for name in at.names if name not in at.left_out)


def test_the_mean_of_a_probe_of_whole_evidence_is_the_trace(monkeypatch):
    for name, case in (("f-fc+conv", CASES[1]), ("gconv:c4", CASES[0]), ("mlp", CASES[3])):
        model, data, at, prior = problem(name, case)
        for count in (0, 8, 10**4):
            few_rows(monkeypatch, count)
            matrix = prepared(model, data, at, prior)
            A = matrix(torch.eye(sum(matrix.H.sizes), dtype=torch.float64))
            assert_close(A, A.mT, **CLOSE)
            if not count:
                assert matrix.mean(None) == pytest.approx(float(A.trace()), rel=1e-10)
            assert torch.linalg.eigvalsh(A).min() >= matrix.least


def test_no_eigenvalue_is_below_the_least_where_few_samples_of_many_are_in_the_preconditioner(monkeypatch):
    """Samples that are alike: what C takes for many times as large as it is in one direction, it is not."""
    few_rows(monkeypatch, 3)
    model, (x, y), at, _ = problem("conv", samples=60)
    matrix = prepared(model, (x, y), at, Prior(at.names, 1.0))
    A = matrix(torch.eye(sum(matrix.H.sizes), dtype=torch.float64))
    least = float(torch.linalg.eigvalsh(A).min())
    assert matrix.least <= least < float(matrix.kept.min())


@pytest.mark.parametrize("how", ROUTES)
def test_whole_evidence_does_not_depend_on_batches_and_order(how):
    model, (x, y), at, prior = problem(samples=9)
    order = torch.randperm(9)
    shuffled = x[order], y[order]
    kinds = [(x, y), shuffled, DataLoader(TensorDataset(*shuffled), 4)]
    found = [
        whole.at(model, data, at, prior, how=how, batch_size=size) for data, size in zip(kinds, (None, 2, None), strict=True)
    ]
    found.append(whole.at(model, (x, y), at, prior, how=how, memory=1e-5))
    for other in found[1:]:
        assert_close(other.evidence.log_evidence, found[0].evidence.log_evidence, **CLOSE)
        assert_close(other.gamma, found[0].gamma, **CLOSE)


@pytest.mark.distributed
def test_whole_evidence_of_two_processes_is_that_of_one(tmp_path):
    expected = workers.whole_evidence()
    for found in workers.run("whole_evidence", 2, tmp_path):
        for how in ROUTES:
            assert found[how] == pytest.approx(expected[how], rel=1e-8)


@pytest.mark.parametrize("how", ROUTES)
def test_a_silent_path_changes_nothing_of_whole_evidence(how):
    torch.manual_seed(0)
    model = randomised(small("f-fc+conv"))
    with torch.no_grad():
        for block in model.blocks:
            for name, weight in block.named_parameters():
                if "f-fc" in name:
                    weight.zero_()
    x = torch.randn(12, 2, 4, 4, dtype=torch.float64)
    data = x, CASES[0].draw(model(x).detach())
    at = laplace.at(model, data)
    assert at.left_out
    values = []
    for precision in (0.3, 3.0):
        prior = Prior(at.names, {name: precision if name in at.left_out else 1.0 for name in at.names})
        found = whole.at(model, data, at, prior, how=how)
        silent = [index for index, name in enumerate(at.names) if name in at.left_out]
        assert not found.gamma[silent].any()
        values.append(found)
    one, two = values
    assert_close(one.evidence.log_evidence, two.evidence.log_evidence, **CLOSE)
    assert_close(one.gamma, two.gamma, **CLOSE)
    if how != "probes":
        value, _ = dense(model, data, at, prior, CASES[0])
        assert_close(found.evidence.log_evidence.detach(), value, **CLOSE)


def test_whole_evidence_of_other_data_or_weights_is_refused():
    model, (x, y), at, prior = problem("mlp")
    for other in ((x[:-1], y[:-1]), (x + 0.1, y), (x, y.roll(1))):
        with pytest.raises(ValueError, match="pass the data of the fit"):
            whole.at(model, other, at, prior)
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-3
    with pytest.raises(ValueError, match=r"0\.weight changed since the evidence was taken"):
        whole.at(model, (x, y), at, prior)


def test_whole_evidence_refuses_what_it_cannot_do():
    model, data, at, prior = problem("mlp")
    with pytest.raises(ValueError, match="Gaussian priors: pass nu=inf"):
        whole.at(model, data, at, Prior(at.names, nu=3.0))
    with pytest.raises(ValueError, match=r"use Prior\(evidence.names\)"):
        whole.at(model, data, at, Prior(at.names[1:]))
    with pytest.raises(ValueError, match="nats and seconds must be positive"):
        whole.at(model, data, at, prior, nats=0.0)
    with pytest.raises(ValueError, match="how must be"):
        whole.at(model, data, at, prior, how="guess")
    model.append(nn.Dropout())
    with pytest.raises(ValueError, match="train mode"):
        whole.at(model, data, at, prior)


@pytest.mark.parametrize("name", ["fc", "f-fc+conv", "mlp"])
def test_whole_evidence_by_rows_whose_outer_products_are_kept(name, monkeypatch):
    """As in wide layers, whose weights are too many to join."""
    case = CASES[0]
    model, data, at, prior = problem(name, case)
    monkeypatch.setattr(factorised, "outer_is_slower", lambda *sizes: False)
    monkeypatch.setattr(rows, "TILE", 40)
    value, gamma = dense(model, data, at, prior, case)
    found = whole.at(model, data, at, prior, how="rows")
    assert_close(found.evidence.log_evidence, value, **CLOSE)
    assert_close(found.effective_parameters(prior), gamma, **CLOSE)


@pytest.mark.parametrize("how", ["weights", "rows"])
def test_whole_evidence_of_matrices_larger_than_a_panel(how, monkeypatch):
    model, data, at, prior = problem("f-fc+conv")
    expected = whole.at(model, data, at, prior, how=how)
    monkeypatch.setattr(rows, "PANEL", 5)
    monkeypatch.setattr(factorised, "COLUMNS", 7)
    found = whole.at(model, data, at, prior, how=how)
    assert_close(found.evidence.log_evidence, expected.evidence.log_evidence, **CLOSE)
    assert_close(found.gamma, expected.gamma, **CLOSE)


def test_whole_evidence_stops_at_so_many_products(monkeypatch):
    model, data, at, prior = problem("conv", samples=20)
    exact = whole.at(model, data, at, prior, how="weights").evidence.log_evidence
    made = []

    class Counted(GaussNewton):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(whole, "GaussNewton", Counted)
    for products in (20, 33, 60, 300):
        found = whole.at(model, data, at, prior, how="probes", nats=1e-3, products=products)
        assert found.probes * found.steps <= made[-1].products <= products
        assert abs(found.evidence.log_evidence - exact) < 5 * found.evidence.standard_error + found.truncation
    again = whole.at(model, data, at, prior, how="probes", nats=1e-3, products=300)
    assert again.evidence.log_evidence == found.evidence.log_evidence
    hasty = whole.at(model, data, at, prior, how="probes", nats=1e-3, seconds=1e-3)
    assert (hasty.probes, hasty.steps) == (probes.FEWEST, probes.LEAST_STEPS)
    with pytest.raises(ValueError, match="seconds must be positive"):
        whole.at(model, data, at, prior, seconds=0.0)
    with pytest.raises(ValueError, match="20 products at least, got 64 and 19"):
        whole.at(model, data, at, prior, products=19)


@pytest.mark.parametrize("case", [LIKELIHOODS[0], LIKELIHOODS[1]])
def test_few_products_of_whole_evidence_go_to_few_deep_probes(case, monkeypatch):
    """Where a matrix is hard, as the prior says little: the sum of standard error and truncation is less, and still holds."""
    few_rows(monkeypatch, 0)
    model, data, at, _ = problem("f-fc+conv", case, samples=20)
    prior = Prior(at.names, 1e-4)
    exact, _ = dense(model, data, at, prior, case)

    def doubts():
        found = [whole.at(model, data, at, prior, how="probes", products=40, seed=seed) for seed in range(8)]
        for one in found:
            error = float(one.evidence.log_evidence.detach() - exact)
            assert -one.truncation - 4 * one.evidence.standard_error < error < 4 * one.evidence.standard_error
        assert all(0 < one.gamma.sum() < at.sizes.sum() for one in found)
        return found, sum(one.truncation + one.evidence.standard_error for one in found)

    deep, least = doubts()
    assert max(one.probes for one in deep) < probes.FEWEST
    monkeypatch.setattr(probes.Depth, "going_on", lambda depth, found: len(found.x))
    shallow, most = doubts()
    assert all(one.probes == probes.FEWEST for one in shallow)
    assert min(one.steps for one in deep) > max(one.steps for one in shallow)
    assert least < 0.75 * most


def test_one_probe_knows_its_error_by_the_quadrature():
    """And several, if their values spread more than that."""
    torch.manual_seed(0)
    root = torch.randn(30, 30, dtype=torch.float64)
    A, z = root @ root.mT + 0.1 * torch.eye(30, dtype=torch.float64), torch.randn(4, 30, dtype=torch.float64).sign()
    mean, depth = float(A.trace()), probes.Depth(SimpleNamespace(left=lambda: 0), 0.1, float(A.trace()))
    for count, steps in ((4, 6), (1, 9)):
        found = solve(lambda v: v @ A, z[:count], lambda found: False, steps, 1)
        lower, upper = found.log_bracket(0.1)
        assert depth.see(found) == pytest.approx(float((upper - lower).mean()) / 2)
        slope = found.log_slope()
        chance, centred = found.log_chances(slope).mean(), upper - slope * (found.forms - mean)
        assert 4 * depth.spread**2 == pytest.approx(float(max(chance, centred.var()) if count == 4 else chance))


def test_probes_go_on_so_that_truncation_and_standard_error_are_least_in_sum():
    class Found:
        def __init__(self, count, steps):
            self.x, self.steps = [None] * count, steps

    def kept(left, spread, gaps, count=8):
        depth = probes.Depth(SimpleNamespace(left=lambda: left), 0.1, None)
        depth.gaps, depth.spread = gaps, spread
        return depth.going_on(Found(count, max(gaps)))

    falls = {5: 1024.0, 10: 32.0}  # by half each step
    assert kept(10_000, 5.0, falls) == 8, "all, if there is enough for them"
    assert kept(32, 5.0, falls) == 4, "4 more steps leave 2, and 8 steps of four probes 0.1"
    assert kept(8, 5.0, falls) == 1
    assert kept(8, 500.0, falls) == 8, "truncation is nothing beside the spread"
    assert kept(8, 5.0, {4: 1024.0}) == 8, "too early to know"
    assert kept(8, 5.0, {5: 32.0, 10: 32.0}) == 8, "more steps would not help"
    assert kept(8, 5.0, {5: 1024.0, 9: 32.0, 10: 32.0}) == 1, "a single step says little: the fall is since half as many"


def test_more_nats_of_whole_evidence_cost_less(monkeypatch):
    few_rows(monkeypatch, 0)
    model, data, at, prior = problem("conv", samples=20)
    many = {"how": "probes", "products": 10**9}  # so that steps do not stop at the error that products allow
    rough, fine = (whole.at(model, data, at, prior, nats=nats, **many) for nats in (50.0, 0.001))
    assert rough.probes == probes.AT_ONCE
    assert fine.probes > rough.probes
    assert fine.steps > rough.steps
    assert fine.truncation < rough.truncation
    again = whole.at(model, data, at, prior, how="probes", nats=50.0)
    assert again.evidence.log_evidence == rough.evidence.log_evidence
    other = whole.at(model, data, at, prior, how="probes", nats=50.0, seed=1)
    assert other.evidence.log_evidence != rough.evidence.log_evidence


@pytest.mark.parametrize("case", [LIKELIHOODS[0], LIKELIHOODS[1]])
def test_the_standard_error_of_whole_evidence_covers_the_exact_one(case, monkeypatch):
    few_rows(monkeypatch, 12)
    model, data, at, prior = problem("f-fc+conv", case, samples=20)
    exact, _ = dense(model, data, at, prior, case)
    inside = []
    for seed in range(40):
        found = whole.at(model, data, at, prior, how="probes", nats=0.5, probes=4, seed=seed)
        error = float(found.evidence.log_evidence.detach() - exact)
        inside.append(-found.truncation - 2 * found.evidence.standard_error <= error <= 2 * found.evidence.standard_error)
    assert sum(inside) >= 36
