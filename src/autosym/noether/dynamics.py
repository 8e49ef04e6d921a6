"""Hamiltonian dynamics by automatic differentiation, and Hamiltonians averaged over flows.

x' = J grad H(x),       H(x) = mean over tau of F(flow_tau(x))
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Scalar = Callable[[Tensor], Tensor]  # (..., M) to (...), each point separately
Field = Callable[[Tensor], Tensor]  # (..., M) to (..., M)


class Conserved(Protocol):
    """K quantities with their values (..., K) and their flow (S, ..., M) at times tau (S, K)."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def flow(self, x: Tensor, tau: Tensor) -> Tensor: ...


def apply_j(v: Tensor) -> Tensor:
    """J (a, b) = (b, -a) along the last axis."""
    a, b = v.chunk(2, -1)
    return torch.cat([b, -a], -1)


def gradient(f: Scalar, x: Tensor) -> Tensor:
    """grad f at every point (..., M), differentiable again; f at one point must not depend on other points."""
    return torch.func.grad(lambda y: f(y).sum())(x)


def velocity(hamiltonian: Scalar, x: Tensor) -> Tensor:
    """x' = J grad H(x)."""
    return apply_j(gradient(hamiltonian, x))


def symmetrised(network: Scalar, conserved: Conserved, tau: Tensor) -> Scalar:
    """H(x) = mean_s F(flow(x, tau_s)), for any scalar F: (..., M) to (...). All points and steps share one set of tau.

    An average over a bounded set is not an average over a group. H is exactly invariant only for one compact quantity over whole
    periods. Otherwise ``residual`` measures how far it is from invariant.
    """
    return lambda x: network(conserved.flow(x, tau)).mean(0)


def residual(network: Scalar, conserved: Conserved, x: Tensor, tau: Tensor, moves: Tensor) -> float:
    """How much H changes under the flow, relative to F: 0 means invariant, 1 means that H changes as much as F.

    rms (H(flow(x, moves)) - H(x)) / rms (F(flow(x, moves)) - F(x))
    """
    with torch.no_grad():
        hamiltonian, moved = symmetrised(network, conserved, tau), conserved.flow(x, moves)
        change = (hamiltonian(moved) - hamiltonian(x)).square().mean()
        before = (network(moved) - network(x)).square().mean()
    return float((change / before.clamp_min(torch.finfo(x.dtype).tiny)).sqrt())


def euler(field: Field, x: Tensor, dt: float, steps: int = 1) -> Tensor:
    """x(dt) by explicit Euler steps, as published; each step adds energy to an oscillator."""
    h = dt / steps
    for _ in range(steps):
        x = x + h * field(x)
    return x


def midpoint(field: Field, x: Tensor, dt: float, steps: int = 1, iterations: int = 6) -> Tensor:
    """x(dt) by the implicit midpoint rule, y = x + h f((x + y) / 2): symplectic for any H, keeps quadratic quantities, second order.

    Leapfrog would be explicit, but it needs a separable H, and a learned H is not separable. The fixed point is iterated
    ``iterations`` times from an Euler step. Each iteration multiplies the error by about h |f'| / 2, so keep h |f'| well below 1.
    """
    h = dt / steps
    for _ in range(steps):
        slope = field(x)
        for _ in range(iterations):
            slope = field(x + h / 2 * slope)
        x = x + h * slope
    return x


def trajectory(
    field: Field, start: Tensor, dt: float, count: int, substeps: int = 1, integrator: Callable[..., Tensor] = midpoint
) -> Tensor:
    """The states (..., count + 1, M) at times 0, dt, ..., count dt."""
    states = [start]
    for _ in range(count):
        states.append(integrator(field, states[-1], dt, substeps))
    return torch.stack(states, -2)
