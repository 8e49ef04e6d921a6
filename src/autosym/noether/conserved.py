"""Conserved quantities and their flows: the symmetry that Noether's theorem gives to each.

    x = (q, p) in R^M,   J (a, b) = (b, -a),   flow of C:  dx / dtau = J grad C(x)

K quantities move a point together: exp(sum_k tau_k G_k) is the flow of sum_k tau_k C_k for one unit of time.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from autosym.noether.dynamics import apply_j, gradient, midpoint

Measure = Literal["cube", "ball", "gaussian"]


class Quadratic(nn.Module):
    """C_k(x) = 1/2 x^T A_k x + b_k^T x, with A_k symmetric; the flow is affine, by the matrix exponential.

        G_k = [[J A_k, J b_k], [0, 0]]        [x'; 1] = exp(sum_k tau_k G_k) [x; 1]

    They start at small noise: at zero the gradient of any symmetrised function vanishes. b starts and is learned in units of ``size``,
    that of x: A x moves a point the further the larger x is, and b does not.
    """

    size: Tensor

    def __init__(self, dimension: int, quantities: int, std: float = 0.1, size: float = 1.0):
        super().__init__()
        check_even(dimension, "the phase space")
        self.raw = nn.Parameter(std * torch.randn(quantities, dimension, dimension))
        self.shift = nn.Parameter(std * torch.randn(quantities, dimension))
        self.register_buffer("size", torch.tensor(size))

    @classmethod
    def of(cls, A: Tensor, b: Tensor | None = None) -> "Quadratic":
        """The quantities with these A (K, M, M) and b (K, M), zero by default."""
        made = cls(A.shape[-1], len(A)).to(A)
        with torch.no_grad():
            made.raw.copy_(A)
            made.shift.copy_(torch.zeros_like(made.shift) if b is None else b)
        return made

    @property
    def A(self) -> Tensor:
        return (self.raw + self.raw.mT) / 2

    @property
    def b(self) -> Tensor:
        return self.size * self.shift

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,kij,...j->...k", x, self.A, x) / 2 + x @ self.b.mT

    def generators(self) -> Tensor:
        """G_k, (K, M + 1, M + 1)."""
        top = torch.cat([apply_j(self.A.mT).mT, apply_j(self.b)[:, :, None]], 2)  # J acts on the columns
        return torch.cat([top, torch.zeros_like(top[:, :1])], 1)

    def affine(self, tau: Tensor, exponential: Callable[[Tensor], Tensor] = torch.matrix_exp) -> tuple[Tensor, Tensor]:
        """The flow at times tau (S, K) as matrices (S, M, M) and translations (S, M)."""
        moved = exponential(torch.einsum("sk,kij->sij", tau, self.generators()))
        return moved[:, :-1, :-1], moved[:, :-1, -1]

    def flow(self, x: Tensor, tau: Tensor) -> Tensor:
        matrices, shifts = self.affine(tau)
        moved = torch.einsum("sij,...j->s...i", matrices, x)
        return moved + shifts.reshape(len(tau), *(1,) * (x.dim() - 1), -1)


class Network(nn.Module):
    """C(x) by a small network, for quantities that are not quadratic; the flow is solved by the implicit midpoint rule.

    The rule is symplectic, so that its moves are symmetries of phase space at any number of ``steps``, and what they approximate is
    the flow of C. They stay small while |tau C''| / steps is: ``iterations`` are those of the fixed point of each step.
    """

    def __init__(self, dimension: int, quantities: int, hidden: int = 32, steps: int = 16, iterations: int = 8):
        super().__init__()
        check_even(dimension, "the phase space")
        widths = (dimension, hidden, hidden)
        parts = [part for i, o in pairwise(widths) for part in (nn.Linear(i, o), nn.Softplus())]
        self.layers = nn.Sequential(*parts, nn.Linear(hidden, quantities, bias=False))
        self.steps, self.iterations = steps, iterations

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def flow(self, x: Tensor, tau: Tensor) -> Tensor:
        times = tau.reshape(len(tau), *(1,) * (x.dim() - 1), -1)
        start = x.expand(len(tau), *x.shape)
        return midpoint(
            lambda y: apply_j(gradient(lambda z: (self(z) * times).sum(-1), y)), start, 1.0, self.steps, self.iterations
        )


def recordable_exponential(a: Tensor, squarings: int = 6, degree: int = 8) -> Tensor:
    """exp(a) = (sum_n (a / 2^s)^n / n!)^(2^s) by so many products whatever a is: torch's own waits for the device to choose a number.

    In single precision it is exact to about 1e-5 for norms up to 2^(s - 1) = 32: five turns of a rotation. (``nn.warping.exponential``
    is for the 3x3 matrices of the plane, in double precision, which takes more products.)
    """
    scaled, one = a / 2**squarings, torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    found = one + scaled / degree
    for n in range(degree - 1, 0, -1):
        found = one + scaled @ found / n
    for _ in range(squarings):
        found = found @ found
    return found


def check_even(dimension: int, what: str) -> None:
    """Refuse a phase space without as many momenta as positions."""
    if dimension < 2 or dimension % 2:
        raise ValueError(f"{what} has {dimension} dimensions: it must be even, positions first and then as many momenta")


def _ball(u: Tensor) -> Tensor:
    direction = torch.special.ndtri(u[:, :-1])
    return direction / direction.norm(dim=1, keepdim=True) * u[:, -1:] ** (1 / (u.shape[1] - 1))


# From uniform numbers (S, K + 1) to times (S, K): the cube [-1, 1]^K, the unit ball, a Gaussian with the variance of the cube.
MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "cube": lambda u: 2 * u[:, :-1] - 1,
    "ball": _ball,
    "gaussian": lambda u: torch.special.ndtri(u[:, :-1]) / math.sqrt(3),
}


def times(measure: Measure, uniform: Tensor) -> Tensor:
    """tau (S, K) from uniform numbers (S, K + 1), scaled by pi: a rotation with |tau| <= pi makes whole periods."""
    if measure not in MEASURES:
        raise ValueError(f"no measure is called {measure!r}: use {', '.join(MEASURES)}")
    return math.pi * MEASURES[measure](uniform.clamp(1e-6, 1 - 1e-6))


def draw(measure: Measure, count: int, quantities: int, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """``count`` independent times tau (S, K), of the type and on the device of ``like``."""
    uniform = torch.rand(count, quantities + 1, generator=generator, dtype=like.dtype, device=like.device)
    return times(measure, uniform)


def spread(measure: Measure, count: int, quantities: int, like: Tensor, seed: int) -> Tensor:
    """``count`` times spread evenly (a scrambled Sobol sequence): averages over them err less than over independent ones."""
    return times(measure, even(count, quantities, like, seed))


def even(count: int, quantities: int, like: Tensor, seed: int = 0) -> Tensor:
    """Uniform numbers (S, K + 1) spread evenly over the cube, for ``times`` or ``shifted``."""
    engine = torch.quasirandom.SobolEngine(quantities + 1, scramble=True, seed=seed)
    return engine.draw(count, dtype=torch.float64).to(like)


def shifted(measure: Measure, uniform: Tensor) -> Tensor:
    """Times from evenly spread numbers, all moved around the cube by one random shift: each is uniform, together they stay even.

    The shift is drawn on the device, so that other times at every step need nothing from the host.
    """
    return times(measure, (uniform + torch.rand_like(uniform[:1])) % 1)
