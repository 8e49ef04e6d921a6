"""Conjugate gradients and the bracket of z^T log(A) z, against dense eigenvalues."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from autosym.curvature.krylov import solve
from autosym.runtime.arithmetic import NotFinite


def examples(count):
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)


def matrix(size, spread, seed):
    """A random symmetric matrix with eigenvalues within exp(-spread) to exp(spread), its logarithm, and its least eigenvalue."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    logs = spread * (2 * torch.rand(size, generator=generator, dtype=torch.float64) - 1)
    return (vectors * logs.exp()) @ vectors.mT, (vectors * logs) @ vectors.mT, float(logs.min().exp())


def signs(count, size, seed=0):
    return 2.0 * torch.randint(2, (count, size), generator=torch.Generator().manual_seed(seed)).double() - 1


def never(_):
    return False


@examples(40)
@given(
    size=st.integers(2, 30),
    spread=st.floats(0.1, 6),
    steps=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    below=st.floats(0.1, 1),
)
def test_the_bracket_holds_at_every_number_of_steps(size, spread, steps, seed, below):
    A, log, least = matrix(size, spread, seed)
    z = signs(3, size, seed)
    found = solve(lambda v: v @ A, z, never, steps)
    lower, upper = found.log_bracket(below * least)
    truth = (z @ log * z).sum(1)
    rounding = 1e-8 * size * (1 + spread)
    assert (lower <= truth + rounding).all()
    assert (upper >= truth - rounding).all()


def test_the_bracket_closes_and_the_solution_is_exact():
    A, log, least = matrix(20, 1.0, 3)
    z = signs(4, 20)
    widths = []
    for steps in (1, 3, 6, 30):
        found = solve(lambda v: v @ A, z, never, steps)
        lower, upper = found.log_bracket(0.9 * least)
        widths.append(float((upper - lower).max()))
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 0.1 > 1e-7 > widths[-1]
    assert_close(found.x, torch.linalg.solve(A, z.mT).mT, rtol=1e-9, atol=1e-9)
    assert found.steps < 30, "it ends where the residual is rounding"
    assert_close(upper, (z @ log * z).sum(1), rtol=1e-9, atol=1e-9)


def test_a_node_above_the_least_eigenvalue_is_no_bound():
    A, log, least = matrix(20, 3.0, 3)
    z = signs(4, 20)
    lower, _ = solve(lambda v: v @ A, z, never, 3).log_bracket(40 * least)
    assert (lower > (z @ log * z).sum(1)).any(), "the control of the bracket"


def test_right_sides_do_not_touch_each_other():
    A, _, least = matrix(12, 2.0, 5)
    z = signs(3, 12)
    z[1] = torch.linalg.eigh(A)[1][:, 0]  # done after one step
    z[2] = 0
    together = solve(lambda v: v @ A, z, never, 8)
    alone = solve(lambda v: v @ A, z[:1], never, 8)
    assert_close(together.x[:1], alone.x)
    assert_close(together.log_bracket(least)[1][:1], alone.log_bracket(least)[1])
    assert float(together.log_bracket(least)[1][1]) == pytest.approx(math.log(least), rel=1e-9)
    assert not together.x[2].any()


def test_it_asks_whether_that_is_enough():
    A, _, _ = matrix(30, 3.0, 1)
    asked = []
    found = solve(lambda v: v @ A, signs(2, 30), lambda s: asked.append(s.steps) or s.steps >= 8, 100, check=4)
    assert asked == [4, 8]
    assert found.steps == 8


def test_the_slope_is_that_of_the_nearest_line():
    A, log, _ = matrix(25, 2.0, 2)
    z = torch.linalg.eigh(A)[1].mT  # together they see every eigenvalue alike
    found = solve(lambda v: v @ A, z, never, 25)
    centred = A - A.diagonal().mean() * torch.eye(25, dtype=torch.float64)
    assert found.log_slope() == pytest.approx(float((centred * log).sum() / centred.square().sum()), rel=1e-8)
    assert_close(found.forms, (z @ A * z).sum(1))
    identity = solve(lambda v: v, signs(2, 5), never, 3)
    assert identity.log_slope() == 0


def test_a_matrix_that_is_not_positive_is_refused():
    A = torch.diag(torch.tensor([1.0, -2.0], dtype=torch.float64))
    with pytest.raises(NotFinite, match="no curvature"):
        solve(lambda v: v @ A, signs(1, 2), never, 5)
