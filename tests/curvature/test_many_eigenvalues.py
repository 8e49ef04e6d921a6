"""Many symmetric matrices of one size, solved together: Triton's kernels against LAPACK, and who is sent to them."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from autosym.curvature import eigenvalues, many_eigenvalues
from autosym.curvature.many_eigenvalues import agree

INTERPRETED = """
import torch
from autosym.curvature import many_eigenvalues as many

torch.manual_seed(0)
for n in (1, 2, 5, 40):
    x = torch.randn(3, n, max(1, n // 2), dtype=torch.float64)
    matrices = x @ x.mT
    matrices[1] = torch.diag(torch.arange(n).double())  # nothing to reflect
    matrices[2] *= 0
    kernels = many._kernels()
    found = many.bisected(kernels, *many.tridiagonal(kernels, matrices.clone()))
    torch.testing.assert_close(found, torch.linalg.eigvalsh(matrices), atol=1e-12, rtol=0)
"""


def matrices(count: int, n: int, rank: int, device: str = "cpu") -> Tensor:
    """Positive semi-definite, of unit trace."""
    x = torch.randn(count, n, rank, dtype=torch.float64, device=device)
    found = x @ x.mT
    return found / found.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which comes with torch's builds for GPUs")
def test_kernels_in_the_interpreter_find_what_lapack_finds():
    subprocess.run([sys.executable, "-c", INTERPRETED], env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("count", "n", "rank"), [(9, 65, 65), (40, 130, 20), (12, 1024, 700), (8, 2048, 2048)])
def test_on_a_gpu_they_find_what_lapack_finds(count: int, n: int, rank: int):
    torch.manual_seed(n)
    given = matrices(count, n, rank, "cuda")
    given[0] = torch.diag(torch.linspace(0, 1, n, dtype=torch.float64, device="cuda"))
    wanted, found = torch.linalg.eigvalsh(given), many_eigenvalues.eigenvalues(given)
    assert found is not None
    torch.testing.assert_close(found, wanted, atol=1e-13, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_halves_that_differ_by_rounding_are_averaged():
    given = matrices(9, 130, 130, "cuda")
    noise = 1e-7 * given * torch.randn_like(given)
    found = many_eigenvalues.eigenvalues(given + noise)
    assert found is not None
    torch.testing.assert_close(found, torch.linalg.eigvalsh(given + (noise + noise.mT) / 2), atol=1e-13, rtol=0)


def test_without_a_gpu_they_leave_it_to_others():
    assert many_eigenvalues.eigenvalues(matrices(3, 5, 5)) is None


def test_eigenvalues_of_another_matrix_are_noticed():
    given = matrices(4, 6, 6)
    found, trace, square = torch.linalg.eigvalsh(given), given.diagonal(dim1=1, dim2=2).sum(1), given.square().sum((1, 2))
    assert agree(found, trace, square)
    moved = found.clone()
    moved[2, 3] += 1e-7
    assert not agree(moved, trace, square)
    moved[2, 4] -= 1e-7  # the trace is right again, the norm is not
    assert not agree(moved, trace, square)
    assert not agree(found.where(found < found.max(), torch.nan), trace, square)


def test_sizes_that_are_many_go_together_in_portions(monkeypatch):
    """Here the GPU is a stub: what is sent to it, and that everybody gets its own eigenvalues back."""
    sent = []

    def solve(given: Tensor) -> Tensor | None:
        sent.append(tuple(given.shape))
        return None if len(given) == 6 else torch.linalg.eigvalsh(given)

    monkeypatch.setattr(many_eigenvalues, "eigenvalues", solve)
    monkeypatch.setattr(eigenvalues, "SHORT", 3)
    monkeypatch.setattr(eigenvalues, "TOGETHER", 10 * 16)  # ten matrices of four rows
    torch.manual_seed(0)
    shapes = {"a": (6, 4), "few": (7, 5), "b": (5, 4), "short": (20, 2), "c": (5, 4), "d": (4, 6), "e": (4, 6)}
    factors = {name: matrices(count, n, n) for name, (count, n) in shapes.items()}
    found = eigenvalues._of_many(factors, factors.__getitem__)
    assert sent == [(6, 4, 4), (10, 4, 4), (4, 6, 6), (4, 6, 6)]  # seven are few, two rows are short
    assert set(found) == {"b", "c", "d", "e"}  # a could not be solved so
    for name, values in found.items():
        torch.testing.assert_close(values, torch.linalg.eigvalsh(factors[name]))


def test_large_ones_that_are_few_join_the_next_size(monkeypatch):
    monkeypatch.setattr(many_eigenvalues, "eigenvalues", lambda given: torch.linalg.eigvalsh(given))
    for name, value in (("SHORT", 3), ("WIDE", 5)):
        monkeypatch.setattr(eigenvalues, name, value)
    torch.manual_seed(0)
    shapes = {"many": (9, 8), "joins": (2, 6), "short": (2, 5), "joins too": (1, 7), "alone": (2, 9)}
    factors = {name: matrices(count, n, 3) for name, (count, n) in shapes.items()}
    found = eigenvalues._of_many(factors, factors.__getitem__)
    assert set(found) == {"many", "joins", "joins too"}
    for name, values in found.items():
        torch.testing.assert_close(values, torch.linalg.eigvalsh(factors[name]), atol=1e-12, rtol=0)
