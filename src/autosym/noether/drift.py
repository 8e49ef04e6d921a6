"""Does a quantity change along trajectories, by more than noise of the states explains?

    drift^2 = mean (C - its mean along the trajectory)^2 / U        U = mean sum_i m_i (dC / dx_i)^2
    noise^2 = mean sum_i s_i^2 (dC / dx_i)^2             / U

m_i is the variance of coordinate i between trajectories at the same time, times a number for all of them: the part of the variance of all
states that lies along trajectories. So U is what C would change by, if every coordinate moved by itself as far as trajectories differ. No
unit of a coordinate matters, and trajectories that are nearly alike make no quantity look constant. White noise of variance s_i^2 in
coordinate i moves the states, and C changes by its slope times that.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from autosym.noether.conserved import Quadratic

ORDERS = 6  # of differences that noise is looked for in
LEVEL = 0.7  # differences of the last order are as large as those before, at least, if they are white noise
LOUD = 0.1  # of the deviation between trajectories: what is larger may be motion between states, and explains nothing
SURE = 1.25  # noise that explains so many times the drift that is there is no white noise
STILL = 0.02  # a quantity whose drift exceeds what noise explains by at most this does not change
UNCLEAR = 0.05  # up to this it is undecided whether it changes; beyond, it does
ALIKE = 0.1  # of the deviation of C over all states: if C changes by more along trajectories, it tells them hardly apart

Doubt = Literal["", "evidence", "unclear", "alike", "changes"]  # why a quantity does not count as conserved; "": it does


def motion(x: Tensor) -> Tensor:
    """m_i (M,) of trajectories (N, T, M)."""
    along = (x - x.mean(1, keepdim=True)).square().mean((0, 1))
    whole = x.flatten(0, 1).var(0, correction=0).clamp_min(torch.finfo(x.dtype).tiny)
    return between(x) * (along / whole).mean()


def between(x: Tensor) -> Tensor:
    """The variance (M,) between trajectories (N, T, M) at the same time, in the mean over time; of all states, if there is one."""
    return x.var(0).mean(0) if len(x) > 1 else x[0].var(0)


def changes(quantity: Quadratic, x: Tensor, moves: Tensor | None = None) -> Tensor:
    """(C - its mean along a trajectory) / sqrt U, (N, T), along trajectories x (N, T, M); ``moves`` are m, by default of x.

    0 means conserved.
    """
    with torch.no_grad():
        C = quantity(x.to(quantity.b))[..., 0]
        return (C - C.mean(1, keepdim=True)) / _usual(quantity, x, moves).sqrt()


def drift_of(quantity: Quadratic, x: Tensor, moves: Tensor | None = None) -> float:
    """The root mean square of ``changes``."""
    return float(changes(quantity, x, moves).square().mean().sqrt())


def noise_of(quantity: Quadratic, x: Tensor, moves: Tensor | None = None) -> tuple[float, float]:
    """The drift that noise of the states explains, at least and at most."""
    with torch.no_grad():
        slopes, usual = _slopes(quantity, x).square(), _usual(quantity, x, moves)
        each = [(slopes * s.to(slopes)).sum(-1).mean() * (1 - 1 / x.shape[1]) for s in noise(x)]
        least, most = (float((explained / usual).sqrt()) for explained in each)
        return least, most


def unexplained(drift: float, noise: float) -> float:
    """The drift that noise does not explain."""
    return math.sqrt(max(drift**2 - noise**2, 0.0))


def noise(x: Tensor) -> tuple[Tensor, Tensor]:
    """The variance (M,) of white noise in trajectories (N, T, M), at least and at most.

    At most: the least of mean (k-th difference)^2 / binomial(2k, k) over k. White noise has the same at every k, and smooth motion adds
    to it, the less the higher k is. At least: the same where the last two orders agree, as they do for white noise, and it is not too
    ``LOUD``, else none.
    """
    orders = range(1, min(ORDERS, x.shape[1] - 1) + 1)
    seen = torch.stack([x.diff(k, dim=1).square().mean((0, 1)) / math.comb(2 * k, k) for k in orders])
    most = seen.amin(0)
    level = (seen[-1] >= LEVEL * seen[-2]) & (seen[-2] >= LEVEL * seen[-1])
    return torch.where(level & (most <= LOUD**2 * between(x)), most, 0.0), most


def judged(quantity: Quadratic, train: Tensor, held_out: Tensor) -> Doubt:
    """Whether a quantity changes along either set of trajectories; if it does not, whether it differs between them."""
    every = torch.cat([train, held_out])
    moves = motion(every)
    least, most = (max(bounds) for bounds in zip(*(_unexplained(quantity, x, moves) for x in (train, held_out)), strict=True))
    if least > UNCLEAR:
        return "changes"
    if most > STILL:
        return "unclear"
    with torch.no_grad():
        whole = quantity(every.to(quantity.b))[..., 0].var(correction=0)
        along = _unexplained(quantity, every, moves)[1] * float(_usual(quantity, every, moves).sqrt())
    return "" if along < ALIKE * float(whole.sqrt()) else "alike"


def _unexplained(quantity: Quadratic, x: Tensor, moves: Tensor) -> tuple[float, float]:
    """The drift that noise does not explain, at least and at most."""
    drift, (least, most) = drift_of(quantity, x, moves), noise_of(quantity, x, moves)
    known = least if least <= SURE * drift else 0.0
    return unexplained(drift, most), unexplained(drift, known)


def _slopes(quantity: Quadratic, x: Tensor) -> Tensor:
    return torch.einsum("ij,ntj->nti", quantity.A[0], x.to(quantity.b)) + quantity.b[0]


def _usual(quantity: Quadratic, x: Tensor, moves: Tensor | None) -> Tensor:
    """U."""
    slopes, moves = _slopes(quantity, x), motion(x) if moves is None else moves
    return (slopes.square() * moves.to(slopes)).sum(-1).mean().clamp_min(torch.finfo(slopes.dtype).tiny)
