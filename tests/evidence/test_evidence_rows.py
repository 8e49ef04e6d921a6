"""The Jacobian row by row: products of its rows, along vectors and back, against the matrix itself."""

import pytest
import torch
from torch.testing import assert_close

from autosym.evidence import rows
from autosym.evidence.rows import Rows


def made(kind, samples=7, each=3, blocks=2, out=4, inside=5):
    torch.manual_seed(0)
    if kind == "weights":
        return Rows("path", torch.randn(samples * each, 11, dtype=torch.float64))
    gradients = torch.randn(blocks, samples * each, out, dtype=torch.float64)
    return Rows("path", gradients, torch.randn(blocks, samples, inside, dtype=torch.float64))


def test_a_row_is_the_outer_product_of_its_gradient_and_its_samples_input():
    found = made("outer")
    row = torch.stack([torch.outer(found.gradients[k, 8], found.inputs[k, 2]) for k in range(2)])
    assert_close(found.dense()[8], row.flatten())
    assert len(found) == len(found.dense()) == 21


@pytest.mark.parametrize("kind", ["weights", "outer"])
@pytest.mark.parametrize("tile", [1, 100, 10**9])
def test_products_of_rows_are_those_of_the_matrix(kind, tile, monkeypatch):
    monkeypatch.setattr(rows, "TILE", tile)
    monkeypatch.setattr(rows, "PANEL", 5)
    monkeypatch.setattr(rows, "COLUMNS", 4)
    found = made(kind)
    J = found.dense()
    assert_close(found.kernel(), J @ J.mT)
    total = torch.zeros(21, 21, dtype=torch.float64)
    found.add_kernel(total, 0.3)
    assert_close(rows.symmetric(total), 0.3 * J @ J.mT)


@pytest.mark.parametrize("kind", ["weights", "outer"])
def test_along_vectors_and_back_are_products_with_the_matrix(kind):
    found = made(kind)
    J = found.dense()
    vectors, cotangents = (torch.randn(4, size, dtype=torch.float64) for size in J.shape[::-1])
    assert_close(found.along(vectors), vectors @ J.mT)
    assert_close(found.back(cotangents), cotangents @ J)


def test_rows_that_overflow_are_refused():
    large = Rows("path", torch.full((2, 3), 1e38), None)
    with pytest.raises(ValueError, match="the kernel of path overflowed"):
        large.kernel()
    with pytest.raises(ValueError, match="the Jacobian of path overflowed"):
        Rows("path", torch.full((2, 3), torch.inf)).finite()
