"""The exact variant: a Hamiltonian that is linear in random features, learned from velocities.

    F(x) = sum_f w_f phi_f(x),   phi_f(x) = sqrt(2 / F) cos(omega_f . x / l + c_f),   w ~ N(0, I / delta)
    x' = J grad H(x) + noise,    H(x) = mean over tau of F(flow_tau(x))

The velocities are linear in w, so their evidence is exact. It is differentiable in A and b of the conserved quantities, in the
variance of the noise and in delta; its gradient learns the symmetries. While A and b are learned, the lengthscale l is fixed. A
longer l brings F nearer to a quadratic form, and leaves less for a symmetry to explain. (Learned beside them, l grows until the
evidence says little about A and b.) If the directions of (A, b) are given instead, l and one size for all of them are learned.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autosym.evidence import exact
from autosym.evidence.record import Evidence
from autosym.noether.conserved import Measure, Quadratic, spread
from autosym.noether.dynamics import apply_j

SHRINK = 0.3
FLOOR = 1e-6  # the least variance: noise-free data would drive it to zero


class Regression(nn.Module):
    """Hyperparameters of the model above, including its conserved quantities (None: no symmetry)."""

    omega: Tensor
    phase: Tensor

    def __init__(
        self,
        dimension: int,
        conserved: Quadratic | None,
        features: int = 128,
        measure: Measure = "ball",
        lengthscale: float = 2.5,
        sees: Tensor | None = None,
    ):
        """``sees`` (F, M) are the coordinates that each feature depends on: all by default."""
        super().__init__()
        self.conserved, self.measure = conserved, measure
        self.register_buffer("omega", torch.randn(features, dimension) * (1 if sees is None else sees))
        self.register_buffer("phase", 2 * math.pi * torch.rand(features))
        self.log_precision = nn.Parameter(torch.tensor(0.0))
        self.log_variance = nn.Parameter(torch.tensor(-1.0))
        self.log_lengthscale = nn.Parameter(torch.tensor(math.log(lengthscale)), requires_grad=False)
        self.log_size = nn.Parameter(torch.tensor(0.0), requires_grad=False)  # of all quantities

    def times(self, count: int, seed: int) -> Tensor:
        """A set of evenly spread tau (S, K); without quantities it is a placeholder."""
        quantities = 0 if self.conserved is None else len(self.conserved.b)
        return spread(self.measure, count, quantities, self.omega, seed) if quantities else self.omega.new_zeros(1, 0)

    def features(self, x: Tensor, tau: Tensor) -> Tensor:
        """J grad of each averaged feature at x (N, M): (N M, F)."""
        frequencies = self.omega / self.log_lengthscale.exp()  # (F, M)
        waves, phases = (
            frequencies[:, None],
            self.phase[:, None],
        )  # (F, S, M) and (F, S): omega . (R x + t) = (R^T omega) . x + omega . t
        if self.conserved is not None:
            matrices, shifts = self.conserved.affine(self.log_size.exp() * tau)
            waves = torch.einsum("fi,sij->fsj", frequencies, matrices)
            phases = phases + frequencies @ shifts.mT
        sines = torch.sin(x @ waves.mT + phases[:, None])  # (F, N, S)
        gradients = sines @ waves * (-math.sqrt(2 / len(self.omega)) / waves.shape[1])  # (F, N, M)
        return apply_j(gradients).flatten(1).mT

    def values(self, x: Tensor) -> Tensor:
        """phi(x) before averaging, (..., F): F is linear in these features."""
        return math.sqrt(2 / len(self.omega)) * torch.cos(x @ self.omega.mT / self.log_lengthscale.exp() + self.phase)

    def posterior_mean(self, x: Tensor, velocities: Tensor, tau: Tensor) -> Tensor:
        """The posterior mean of the weights w (F,), given velocities."""
        with torch.no_grad():
            features, precision = self.features(x, tau).double(), self.log_precision.double().exp()
            variance = self.log_variance.double().exp() + FLOOR
            mean = exact.posterior(features, velocities.double().reshape(-1, 1), precision.expand(features.shape[1]), variance)[
                0
            ]
        return mean[:, 0].to(x)

    def evidence(self, x: Tensor, velocities: Tensor, tau: Tensor) -> Evidence:
        """The evidence of all N M numbers in ``velocities`` (N, M), exact for the given tau, in double precision."""
        variance = self.log_variance.double().exp() + FLOOR
        return exact.at(
            self.features(x, tau).double(), velocities.double().flatten(), self.log_precision.double().exp(), variance
        )

    def fit(
        self,
        x: Tensor,
        velocities: Tensor,
        steps: int,
        samples: int,
        lr: float = 0.05,
        seed: int = 0,
        watch: Callable[[int, float], None] | None = None,
    ) -> None:
        """Ascend the evidence in all trainable parameters, with new tau at every step; the rate falls to zero as a cosine.

        A and b have a weak prior, N(0, 1 / SHRINK) in units of the data. It shrinks what the evidence does not support.
        """
        optimiser = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        quantities = [] if self.conserved is None else list(self.conserved.parameters())
        for step in range(steps):
            log_evidence = self.evidence(x, velocities, self.times(samples, seed + step)).log_evidence
            shrinkage = sum(SHRINK / 2 * p.square().sum() for p in quantities)
            optimiser.zero_grad()
            ((shrinkage - log_evidence) / len(x)).backward()
            optimiser.step()
            schedule.step()
            if watch is not None:
                watch(step, float(log_evidence.detach()) / len(x))

    @contextmanager
    def without(self, directions: Tensor) -> Iterator[None]:
        """Project orthonormal ``directions`` (D, M M + M) of (A, b) out of the quantities, inside the ``with`` block."""
        if self.conserved is None:
            raise ValueError("Regression has no conserved quantities to take directions from: make it with some")
        stack = stacked(self.conserved)
        rest = stack - stack @ directions.mT.to(stack) @ directions.to(stack)
        with self.holding(unstacked(rest, float(self.conserved.size))):
            yield

    @contextmanager
    def holding(self, conserved: Quadratic) -> Iterator[None]:
        """Fixed quantities in place of its own, inside the ``with`` block."""
        kept, self.conserved = self.conserved, conserved.requires_grad_(False)
        try:
            yield
        finally:
            self.conserved = kept


def stacked(conserved: Quadratic) -> Tensor:
    """(A_k, b_k / size) as rows, (K, M M + M).

    J is orthogonal, so the generators have the same singular values, with x in units of ``size``.
    """
    return torch.cat([conserved.A.flatten(1), conserved.shift], 1).detach()


def unstacked(rows: Tensor, size: float = 1.0) -> Quadratic:
    """The quantities whose (A_k, b_k / size) are the rows (K, M M + M)."""
    dimension = math.isqrt(rows.shape[1])
    return Quadratic.of(rows[:, : dimension**2].unflatten(1, (dimension, -1)), size * rows[:, dimension**2 :])
