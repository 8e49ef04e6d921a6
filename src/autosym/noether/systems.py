"""Systems with known conserved quantities: oscillators, bodies in the plane, a pendulum."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from autosym.noether.dynamics import midpoint, trajectory, velocity
from autosym.noether.known import Known, bodies, unitary


@dataclass(frozen=True)
class System:
    """A Hamiltonian, and all quantities of degree at most two that it conserves."""

    name: str
    dimension: int  # of phase space
    space: int  # of each body
    hamiltonian: Callable[[Tensor], Tensor]
    conserved: tuple[Known, ...]

    def starts(self, count: int, generator: torch.Generator, p_scale: float = 0.5) -> Tensor:
        """q ~ N(0, 1) and p ~ N(0, p_scale^2), (count, M) in float64."""
        x = torch.randn(count, self.dimension, generator=generator, dtype=torch.float64)
        return x * torch.tensor([1.0, p_scale], dtype=x.dtype).repeat_interleave(self.dimension // 2)

    def trajectories(self, starts: Tensor, dt: float, steps: int) -> Tensor:
        """(count, steps + 1, M), by the midpoint rule with steps of at most 0.02; errors are about 3e-5 per unit of time."""
        substeps = math.ceil(dt / 0.02)
        with torch.no_grad():
            return trajectory(
                lambda x: velocity(self.hamiltonian, x), starts, dt, steps, substeps, partial(midpoint, iterations=4)
            )


def oscillators(count: int) -> System:
    """H = sum_i (q_i^2 + p_i^2) / 2. It conserves the count^2 generators of U(count)."""
    return System(f"{count}-oscillators", 2 * count, 1, lambda x: x.square().sum(-1) / 2, tuple(unitary(count)))


def planar_bodies(count: int = 3, masses: Sequence[float] | None = None) -> System:
    """Bodies in the plane with the potential -m m' / sqrt(r^2 + 1) between any two, all m = 1 by default; q = (x1, y1, x2, y2, ...)."""
    first, second = torch.triu_indices(count, count, 1)
    m = torch.ones(count, dtype=torch.float64) if masses is None else torch.tensor(masses, dtype=torch.float64)

    def hamiltonian(x: Tensor) -> Tensor:
        q, p = (t.unflatten(-1, (count, 2)) for t in x.chunk(2, -1))
        squares = (q[..., first, :] - q[..., second, :]).square().sum(-1)
        mass = m.to(x)
        kinetic = (p.square().sum(-1) / (2 * mass)).sum(-1)
        return kinetic - (mass[first] * mass[second] * (squares + 1).rsqrt()).sum(-1)

    return System(f"{count}-bodies", 4 * count, 2, hamiltonian, tuple(bodies(count, 2, m)))


def pendulum() -> System:
    """H = p^2 / 2 - cos q. It conserves only its energy, and no quantity of degree two."""
    return System("pendulum", 2, 1, lambda x: x[..., 1].square() / 2 - x[..., 0].cos(), ())
