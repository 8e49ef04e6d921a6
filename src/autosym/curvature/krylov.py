"""Conjugate gradients for several right sides at once, and what they know of the matrix: z^T log(A) z with a bracket.

The coefficients of conjugate gradients for A x = z make the tridiagonal Lanczos matrix T of A and z, so that one run gives both
x = A^-1 z and Gauss quadrature, z^T g(A) z ~ |z|^2 e_1^T g(T) e_1. For the logarithm the Gauss rule is too large, and the Gauss-Radau
rule with a node at or below the least eigenvalue too small (Golub and Meurant): the truth is between them, however few steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autosym.runtime.arithmetic import NotFinite

CONVERGED = 1e-12  # of the right side: a residual below it is rounding


@dataclass(frozen=True)
class Solution:
    """x (k, n) with A x ~ z, the Lanczos matrix of each right side, and |z|^2 (k,)."""

    x: Tensor
    diagonal: Tensor  # (k, steps) of T
    beside: Tensor  # (k, steps); the last one leads out of T, and is zero if x is exact
    square_norms: Tensor
    residuals: Tensor  # (k,) |z - A x| / |z|

    @property
    def steps(self) -> int:
        return self.diagonal.shape[1]

    def log_bracket(self, least: float) -> tuple[Tensor, Tensor]:
        """Lower and upper limits (k,) of z^T log(A) z. No eigenvalue of A is below ``least``."""
        below = _radau(self.diagonal, self.beside, least)
        lower, upper = (_first_of_log(*of) for of in (below, (self.diagonal, self.beside[:, :-1])))
        return self.square_norms * lower, self.square_norms * upper

    def log_slope(self) -> float:
        """The slope of the line nearest to log(A) among all a A + b I: that of log(lambda) on lambda over the spectrum."""
        nodes, shares = _quadrature(self.diagonal, self.beside[:, :-1])
        shares = self.square_norms[:, None] * shares / self.square_norms.sum()
        logs, apart = nodes.log(), nodes - (shares * nodes).sum()
        spread = float((shares * apart.square()).sum())
        return float((shares * apart * logs).sum()) / spread if spread > 0 else 0.0

    def log_chances(self, slope: float) -> Tensor:
        """2 z^T (log(A) - slope A - m)^2 z (k,), m the mean over the spectrum: no less, in the mean, than the variance of z^T log(A) z.

        For random signs z, and less ``slope`` times z^T A z. It is 2 tr of the square; without its diagonal, the variance.
        """
        nodes, shares = _quadrature(self.diagonal, self.beside[:, :-1])
        shares, logs = self.square_norms[:, None] * shares, nodes.log() - slope * nodes
        return 2 * (shares * (logs - (shares * logs).sum() / shares.sum()).square()).sum(1)

    @property
    def forms(self) -> Tensor:
        """z^T A z (k,)."""
        return self.square_norms * self.diagonal[:, 0]


def solve(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    enough: Callable[[Solution], bool],
    most: int,
    check: int = 5,
    going_on: Callable[[Solution], int] | None = None,
) -> Solution:
    """A x = z for every row z of ``right`` (k, n), by ``product``: (k, n) -> (k, n), symmetric and positive.

    Every ``check`` steps ``enough`` is asked; at most ``most`` steps are made. Then ``going_on`` may say with how many of the rows to
    go on, the first ones: the solution is theirs.
    """
    x, r, p = torch.zeros_like(right), right.clone(), right.clone()
    norms = old = r.square().sum(1)
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    while True:
        going = old > CONVERGED**2 * norms
        ap = product(p)
        lengths = (p * ap).sum(1)
        if (lengths[going] <= 0).any():
            raise NotFinite("conjugate gradients found a direction of no curvature, by rounding: use model.double()")
        alpha = torch.where(going, old / lengths.where(going, 1), 1.0)
        step = torch.where(going, alpha, 0.0)[:, None]
        x, r = x + step * p, r - step * ap
        new = r.square().sum(1)
        beta = torch.where(going, new / old.where(going, 1), 0.0)
        alphas.append(alpha)
        betas.append(beta)
        p, old = r + beta[:, None] * p, torch.where(going, new, 0.0)
        if len(alphas) % check == 0 or len(alphas) >= most or not (old > CONVERGED**2 * norms).any():
            found = _solution(x, alphas, betas, norms)
            if len(alphas) >= most or not (old > CONVERGED**2 * norms).any() or enough(found):
                return found
            kept = len(x) if going_on is None else going_on(found)
            x, r, p, norms, old = (t[:kept] for t in (x, r, p, norms, old))
            alphas, betas = ([t[:kept] for t in made] for made in (alphas, betas))


def _solution(x: Tensor, alphas: list[Tensor], betas: list[Tensor], norms: Tensor) -> Solution:
    alpha, beta = (torch.stack(found, 1).cpu() for found in (alphas, betas))
    diagonal = 1 / alpha
    diagonal[:, 1:] += beta[:, :-1] / alpha[:, :-1]
    return Solution(x, diagonal, beta.sqrt() / alpha, norms.cpu(), beta.prod(1).sqrt())


def _radau(diagonal: Tensor, beside: Tensor, node: float) -> tuple[Tensor, Tensor]:
    """T with one more row, so that ``node`` is an eigenvalue."""
    rounding = torch.finfo(diagonal.dtype).eps * diagonal.amax(1)
    eliminated = (diagonal[:, 0] - node).clamp_min(rounding)  # pivots of T - node I, which has no negative eigenvalue
    for step in range(1, diagonal.shape[1]):
        eliminated = (diagonal[:, step] - node - beside[:, step - 1].square() / eliminated).clamp_min(rounding)
    last = node + beside[:, -1].square() / eliminated
    return torch.cat([diagonal, last[:, None]], 1), beside


def _first_of_log(diagonal: Tensor, beside: Tensor) -> Tensor:
    """e_1^T log(T) e_1."""
    nodes, shares = _quadrature(diagonal, beside)
    return (shares * nodes.log()).sum(1)


def _quadrature(diagonal: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (k, steps) of T, and the square of the first entry of each eigenvector."""
    values, vectors = torch.linalg.eigh(torch.diag_embed(diagonal) + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1))
    return values.clamp_min(math.ulp(0.0)), vectors[:, 0].square()
