"""Eigenvalues of Kronecker factors: of any size, scale and type, never negative, solved many at a time."""

import ctypes
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import oracles
from autosym.bayes.likelihoods import Categorical
from autosym.curvature import kronecker
from autosym.curvature.eigenvalues import LARGE, _eigvalsh
from autosym.curvature.kronecker import Curvature, Factors, FewColumns, kfac
from autosym.nn import nets
from models import curvature, draw, mlp


@pytest.fixture(autouse=True)
def one_thread():
    """A solver of several threads waits for ever where other work has the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def with_factors(A, G):
    return Curvature({"path": Factors(A, G)}, torch.zeros(()), 1, 1)


def test_eigenvalues_are_those_of_the_kronecker_product():
    found = curvature(mlp(5, 4, 3), draw("categorical", 9))
    for name, (lam, mu) in found.eigenvalues().items():
        products = (lam[0, :, None] * mu[0, None, :]).flatten().sort().values
        dense = torch.linalg.eigvalsh(oracles.kron_blocks(found, name)[0])
        assert_close(products, dense, rtol=1e-9, atol=1e-10)


@pytest.mark.fault(21)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_eigenvalues_survive_any_scale_and_repetition(scale, dtype):
    spread = torch.tensor([0.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    A = (basis * spread @ basis.T * scale).to(dtype)[None]
    G = (torch.eye(3, dtype=torch.float64) * scale).to(dtype)[None]
    lam, mu = with_factors(A, G).eigenvalues()["path"]
    assert lam.dtype == mu.dtype == torch.float64
    tolerance = scale * (1e-6 if dtype == torch.float32 else 1e-13)
    assert_close(mu[0], spread * scale, rtol=0, atol=tolerance)
    assert_close(lam[0], torch.full((3,), scale, dtype=torch.float64), rtol=0, atol=tolerance)
    assert mu.min() >= 0


@pytest.mark.fault(21)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_eigenvalues_of_zero_factors_are_zero_block_by_block(dtype):
    A = torch.stack([torch.zeros(3, 3, dtype=dtype), torch.eye(3, dtype=dtype)])
    lam, mu = with_factors(A, torch.zeros(2, 2, 2, dtype=dtype)).eigenvalues()["path"]
    assert_close(mu, torch.tensor([[0.0, 0, 0], [1, 1, 1]], dtype=torch.float64), rtol=1e-6, atol=0)
    assert lam.tolist() == [[0, 0], [0, 0]]


@pytest.mark.fault(21)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_eigenvalues_are_never_negative(dtype):
    """Those of a matrix of rank one are rounded to both sides of zero."""
    a = torch.randn(60, 1, dtype=dtype)
    factor = (a @ a.T)[None]
    assert torch.linalg.eigvalsh(factor).min() < 0, "the test would be empty"
    lam, mu = with_factors(factor, factor).eigenvalues()["path"]
    assert lam.min() >= 0
    assert mu.min() >= 0


@pytest.mark.fault(21)
def test_eigenvalues_of_a_factor_whose_trace_leaves_float32():
    """Every entry fits in float32, their sum does not."""
    lam, _ = with_factors(torch.eye(1)[None], 2e38 * torch.eye(4)[None]).eigenvalues()["path"]
    assert_close(lam[0], torch.full((4,), 2e38, dtype=torch.float64), rtol=1e-6, atol=0)


def spread_of_sizes():
    """Factors of several sizes and types, among them a zero one, one of rank one, and badly scaled blocks."""

    def positive(blocks, size, dtype=torch.float64):
        root = torch.randn(blocks, size, size, dtype=torch.float64)
        return (root @ root.mT).to(dtype)

    a = torch.randn(1, 4, 1, dtype=torch.float64)
    return {
        "plain": positive(1, 4),
        "zero": torch.zeros(2, 4, 4, dtype=torch.float64),
        "one": positive(3, 1),
        "tiny and huge": positive(3, 4) * torch.tensor([1e-200, 1.0, 1e200], dtype=torch.float64)[:, None, None],
        "single": positive(2, 4, torch.float32),
        "single, badly scaled": positive(2, 4, torch.float32) * torch.tensor([1e-30, 1e30])[:, None, None],
        "rank one": a @ a.mT,
        "larger": positive(1, 7),
        "larger single": positive(1, 7, torch.float32),
        "very large": positive(2, 520),
        "very large single": positive(1, 513, torch.float32),
        "uneven": torch.diag(torch.tensor([1e-12, 1.0, 1e12], dtype=torch.float64))[None],
    }


@pytest.mark.fault(21)
def test_eigenvalues_by_size_are_those_one_by_one():
    factors = spread_of_sizes()
    found = _eigvalsh(factors)
    assert list(found) == list(factors)
    for name, factor in factors.items():
        assert_close(found[name], _eigvalsh({name: factor})[name], rtol=1e-12, atol=0, msg=lambda m, name=name: f"{name}: {m}")
        assert found[name].dtype == torch.float64
        for values, block in zip(found[name], factor.double(), strict=True):
            exact = torch.linalg.eigvalsh(block)
            assert (values - exact).norm() <= (5e-6 if factor.dtype == torch.float32 else 1e-13) * exact.norm(), name
    assert (found["zero"] == 0).all()


def test_eigenvalues_are_solved_once_in_float64_but_for_large_ones(monkeypatch):
    calls, real, factors = [], torch.linalg.eigvalsh, spread_of_sizes()
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda matrices: calls.append(matrices) or real(matrices))
    _eigvalsh(factors)
    solved, asked = Counter(), Counter()
    for counts, matrices in ((solved, calls), (asked, factors.values())):
        for matrix in matrices:
            size = matrix.shape[-1]
            counts[size, matrix.dtype if counts is solved or size > LARGE else torch.float64] += len(matrix)
    assert solved == asked


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_is_as_it_was(threads, monkeypatch):
    factors = {name: factor for name, factor in spread_of_sizes().items() if "very" not in name}
    torch.set_num_threads(threads)
    _eigvalsh(factors)
    assert torch.get_num_threads() == threads
    monkeypatch.setattr(torch.linalg, "eigvalsh", failing([torch.float32, torch.float64]))
    with pytest.raises(ValueError, match="did not converge"):
        _eigvalsh(factors)
    assert torch.get_num_threads() == threads


def openmp():
    """The library of threads that torch has loaded; None if it is not to be found."""
    maps = Path("/proc/self/maps")
    found = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line} if maps.exists() else set()
    return ctypes.CDLL(found.pop()) if len(found) == 1 else None


@pytest.mark.skipif(openmp() is None, reason="torch has another library of threads here")
def test_solvers_have_one_thread_each(monkeypatch):
    """Asked without torch: if asked by torch, a new thread takes the number of the thread that started it."""
    library, seen, real = openmp(), [], torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda matrices: seen.append(library.omp_get_max_threads()) or real(matrices))
    torch.set_num_threads(2)
    _eigvalsh({"path": torch.eye(3).expand(4, 3, 3)})
    assert seen == [1, 1]


def failing(precisions, answer=None):
    """A solver that fails in these precisions, by an error or by values that are not finite."""
    real = torch.linalg.eigvalsh

    def solve(matrices):
        if matrices.dtype not in precisions:
            return real(matrices)
        if answer is None:
            raise torch.linalg.LinAlgError("linalg.eigh: failed to converge")
        return torch.full(matrices.shape[:-1], answer, dtype=matrices.dtype)

    return solve


@pytest.mark.fault(21)
@pytest.mark.parametrize("answer", [None, float("nan"), float("inf")], ids=str)
def test_eigenvalues_that_fail_in_float32_are_taken_in_float64(answer, monkeypatch):
    factors = spread_of_sizes()
    expected = _eigvalsh({name: factor.double() for name, factor in factors.items()})
    monkeypatch.setattr(torch.linalg, "eigvalsh", failing([torch.float32], answer))
    for name, values in _eigvalsh(factors).items():
        assert_close(values, expected[name], rtol=1e-6, atol=1e-6 * float(expected[name].max()))


@pytest.mark.fault(21)
def test_eigenvalues_that_fail_in_float64_are_named(monkeypatch):
    monkeypatch.setattr(torch.linalg, "eigvalsh", failing([torch.float32, torch.float64]))
    with pytest.raises(ValueError, match="the eigenvalues of A of path did not converge, even in float64"):
        _eigvalsh({"A of path": torch.eye(3)[None]})


@pytest.mark.parametrize("columns", [0, 1, 7, 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_eigenvalues_of_few_columns_are_those_of_the_factor(columns, dtype, monkeypatch):
    torch.manual_seed(0)
    spread = torch.logspace(-3, 0, columns, dtype=torch.float64)[:, None]
    few = FewColumns((torch.randn(2, columns, 160, dtype=torch.float64) * spread).to(dtype), torch.eye(3).expand(2, 3, 3))
    exact, sides, real = torch.linalg.eigvalsh(few.columns.double().mT @ few.columns.double()), [], torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda one: sides.append(one.shape[-1]) or real(one))
    lam, mu = Curvature({"path": few}, torch.zeros(()), 1, 1).eigenvalues()["path"]
    assert sorted(sides) == sorted([columns, 3])
    assert_close(mu, exact.clamp_min(0), rtol=0, atol=1e-13 * float(exact.amax()))
    assert (mu[:, : 160 - columns] == 0).all(), "and not the noise of rounding"
    assert_close(lam, torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("batch_size", [None, 7])
@pytest.mark.parametrize(("samples", "subset"), [(4, None), (63, None), (64, None), (64, 63), (70, None)])
def test_columns_are_kept_until_they_are_as_many_as_rows_of_the_factor(samples, subset, batch_size, monkeypatch):
    """256 inputs to every column, four positions: 64 samples are as many columns as A has rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 3, 2, stride=2), nn.Flatten(), nn.Linear(12, 2)).double()
    data = torch.randn(samples, 64, 4, 4, dtype=torch.float64), torch.randint(2, (samples,))
    found = kfac(model, data, Categorical(), batch_size=batch_size, subset=subset)
    kept = found.factors["0.weight"]
    assert isinstance(kept, FewColumns) is ((subset or samples) < 64)
    assert kept.nbytes == 8 * (256 * min(4 * (subset or samples), 256) + 9)
    monkeypatch.setattr(kronecker, "LONG", 257)
    formed = kfac(model, data, Categorical(), batch_size=batch_size, subset=subset)
    assert isinstance(formed.factors["0.weight"], Factors)
    assert_close(kept.A, formed.factors["0.weight"].A, rtol=0, atol=1e-12)
    assert_close(found.eigenvalues()["0.weight"], formed.eigenvalues()["0.weight"], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["fc+conv", "f-fc+conv", "s-fc+s-conv", "where+conv", "turn:c4+gconv:c4", "f-fc+conv+gconv:c4", "pool"]
)
def test_kept_columns_of_every_kind_make_its_factor(name, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    if name == "pool":
        layers = (
            nn.Conv2d(1, 4, 3, padding=1),
            nn.Unflatten(1, (2, 2)),
            nn.Conv3d(2, 3, (1, 3, 3)),
            nn.GroupNorm(1, 3),
            nn.Flatten(2),
        )
        model = nn.Sequential(
            *layers, nn.Conv1d(3, 4, 5, stride=3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2)
        ).double()
    else:
        model = nets.build(name, (1, 8, 8), 2, 3, channels=(1, 2), strides=(2, 2), hidden=2).double()
    data = (x, torch.arange(2))
    formed = kfac(model, data, Categorical())
    monkeypatch.setattr(kronecker, "LONG", 2)
    found = kfac(model, data, Categorical())
    assert any(isinstance(factor, FewColumns) for factor in found.factors.values())
    for path, factor in found.factors.items():
        assert_close(factor.A, formed.factors[path].A, rtol=0, atol=1e-12, msg=lambda m, path=path: f"{path}: {m}")
    for path, (_, mu) in formed.eigenvalues().items():
        assert_close(found.eigenvalues()[path][1], mu, rtol=0, atol=1e-12)


class Overwriting(nn.Module):
    """Its first layer reads a map that is overwritten afterwards, as by an activation with inplace=True."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(200, 5), nn.Linear(5, 3)

    def forward(self, x):
        x = 2 * x
        h = self.first(x)
        x.relu_()
        return self.last(h.tanh())


class OneBuffer(list):
    """A loader that shows every batch in the same memory."""

    def __iter__(self):
        shown = torch.empty_like(self[0][0])
        for x, y in super().__iter__():
            yield shown.copy_(x), y


@pytest.mark.parametrize("model", [Overwriting, lambda: mlp(200, 5, 3)], ids=["by the model", "by the loader"])
def test_kept_columns_are_not_overwritten(model, monkeypatch):
    torch.manual_seed(0)
    model = model().double()
    x, y = torch.randn(30, 200, dtype=torch.float64), torch.arange(30) % 3
    data = OneBuffer(zip(x.split(10), y.split(10), strict=True))
    kept = kfac(model, data, Categorical())
    name = next(name for name, factor in kept.factors.items() if isinstance(factor, FewColumns))
    monkeypatch.setattr(kronecker, "LONG", 1000)
    assert_close(kept.factors[name].A, kfac(model, (x, y), Categorical()).factors[name].A)
