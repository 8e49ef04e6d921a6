"""A user's trajectories: checks, and states with their velocities."""

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from autosym.noether.conserved import check_even

FOLLOWS = (0.9, 0.99)  # correlations of dq/dt: less than the first with its own momentum, more than the second with another


def checked(trajectories: object, dt: object) -> tuple[Tensor, float]:
    """The trajectories (N, T, M) in double precision and the time step, or an error that says what is wrong.

    ``dt`` is the step, or all T observation times, at regular steps.
    """
    try:
        x = torch.as_tensor(np.asarray(trajectories, dtype=np.float64))
        times = np.asarray(dt, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "trajectories must be numbers of shape (N, T, 2n), all of one length: cut longer ones into pieces of equal length"
        ) from error
    if x.dim() != 3:
        raise ValueError(f"trajectories must be of shape (N, T, 2n), got {tuple(x.shape)}: add an axis for a single one")
    check_even(x.shape[2], "the last axis of the trajectories")
    if not len(x):
        raise ValueError("there are no trajectories: give at least one")
    if x.shape[1] < 3:
        raise ValueError(f"trajectories of {x.shape[1]} states are too short: a velocity needs at least 3 in a row")
    if not torch.isfinite(x).all():
        where = tuple(torch.nonzero(~torch.isfinite(x))[0].tolist())
        raise ValueError(f"trajectories have values that are not finite, the first at {where}: leave out those trajectories")
    return x, _step(times, x.shape[1])


def warn_of_axes(x: Tensor) -> None:
    """Few states of many coordinates may be many states of few."""
    states, coordinates = x.shape[1:]
    if coordinates >= 2 * states:
        warnings.warn(
            f"trajectories have {states} states of {coordinates} coordinates each: if that is {coordinates} states of {states}, swap the "
            "last two axes; they are (trajectories, states, coordinates)",
            stacklevel=3,
        )


def warn_of_order(x: Tensor, v: Tensor, names: Sequence[str]) -> None:
    """Positions change with their own momenta, dq/dt ~ p. If one follows another coordinate instead, columns may be in another order."""
    count = len(names) // 2
    found = torch.corrcoef(torch.cat([v.flatten(0, -2)[:, :count], x.flatten(0, -2)], 1).mT)[:count, count:].abs()
    for i in range(count):
        other = int(found[i].argmax())
        if found[i, other] > FOLLOWS[1] and found[i, count + i] < FOLLOWS[0]:
            warnings.warn(
                f"d{names[i]}/dt follows {names[other]}, not {names[count + i]}: columns must be all positions, then all momenta "
                f"({', '.join(names)})",
                stacklevel=3,
            )
            return


def _step(times: np.ndarray, states: int) -> float:
    if times.ndim == 1 and len(times) == states:
        steps = np.diff(times)
        if not np.isfinite(steps).all() or np.ptp(steps) > 1e-3 * abs(steps.mean()):
            raise ValueError(
                f"the times are irregular, with steps from {steps.min():g} to {steps.max():g}: interpolate to a regular grid, "
                "or give the velocities yourself as derivatives="
            )
        times = steps.mean()
    if times.ndim or not np.isfinite(times) or times <= 0:
        raise ValueError(f"dt is {_text(times)}: give one positive step, or the {states} times of the states")
    return float(times)


def _text(times: np.ndarray) -> str:
    return f"{float(times):g}" if times.ndim == 0 else f"an array of shape {times.shape}"


def velocities(x: Tensor, dt: float, window: int = 5) -> tuple[Tensor, Tensor]:
    """States and velocities (N, T - window + 1, M) at the centres of windows, from a polynomial of degree 4 in each window.

    In a window of 5 the polynomial passes through every state: central differences of fourth order. A window of 3 has degree 2 and
    second order. Wider windows are least-squares fits, and remove noise.
    """
    window = min(window, x.shape[1] - (1 - x.shape[1] % 2))
    if window < 3 or window % 2 == 0:
        raise ValueError(f"window must be odd and at least 3, got {window}")
    offsets = torch.arange(window, dtype=x.dtype) - window // 2
    powers = offsets[:, None] ** torch.arange(min(5, window), dtype=x.dtype)
    value, slope = torch.linalg.pinv(powers)[:2]
    seen = x.unfold(1, window, 1)  # (N, T', M, window)
    return seen @ value, seen @ slope / dt
