"""Candidates in closed form: the quantities of degree two that change least along trajectories, in order of their drift.

    C_u(x) = sum_i u_i C_i(x),   C_i all monomials of degree one and two
    drift(u)^2 = u^T (W - S) u / u^T G u,      W = mean (C - its mean along the trajectory)^2,      G = mean grad C diag(m) grad C,
                                               S = mean grad C diag(s^2) grad C, which noise of the states explains (``drift``)

These are matrices, so the quantities of least drift are eigenvectors, found in coordinates of mean 0 and size 1.
"""

import math
from itertools import combinations

import torch
from torch import Tensor

from autosym.noether.conserved import Quadratic
from autosym.noether.drift import between, motion, noise

FLAT = 1e-9  # of the largest: the data do not extend in this direction
NEGLIGIBLE = 5e-3  # drifts below it are taken for equal: noise leaves so much of what is conserved


def least_drift(x: Tensor) -> tuple[Tensor, Tensor]:
    """Drifts (D,) that noise does not explain, in ascending order, and quantities (A, b) as unit rows (D, M M + M).

    ``x`` are trajectories (N, T, M).
    """
    count, length, dimension = x.shape
    basis = monomials(dimension).to(x)
    if count * (length - 1) < len(basis):
        raise ValueError(
            f"{count} trajectories of {length} states are too few to choose among {len(basis)} quantities: they show "
            f"{count * (length - 1)} changes, so {len(basis) - count * (length - 1)} quantities or more do not change, conserved or "
            f"not. Besides those held out, give at least {math.ceil(len(basis) / (length - 1))} trajectories, "
            f"or {math.ceil(len(basis) / count) + 1} states of each"
        )
    states = x.flatten(0, 1)
    centre, size = states.mean(0), between(x).clamp_min(torch.finfo(x.dtype).tiny).sqrt()
    z = (x - centre) / size
    spread = torch.linalg.eigvalsh(torch.corrcoef(states.mT))
    if not spread[0] > FLAT * spread[-1]:
        filled = int((spread > FLAT * spread[-1]).sum())
        raise ValueError(
            f"the states fill only {filled} of {dimension} dimensions, as in the frame of the centre of mass: which quantities of the "
            "other dimensions are conserved cannot be seen. Give trajectories with a moving centre"
        )
    A, b = basis[:, : dimension**2].unflatten(1, (dimension, dimension)), basis[:, dimension**2 :]
    values = torch.einsum("nti,kij,ntj->ntk", z, A, z) / 2 + z @ b.mT
    changes = (values - values.mean(1, keepdim=True)).flatten(0, 1)
    slopes = (torch.einsum("kij,nj->nki", A, z.flatten(0, 1)) + b).mT  # (N T, M, D)
    by_noise = slopes * ((1 - 1 / length) * noise(z)[0]).sqrt()[:, None]
    root = torch.linalg.cholesky(_gram(slopes.flatten(0, 1)) / len(states))
    whitened, noisy = (torch.linalg.solve_triangular(root, t.mT, upper=False) for t in (changes, by_noise.flatten(0, 1)))
    squares, vectors = torch.linalg.eigh((_gram(whitened.mT) - _gram(noisy.mT)) / (len(states) * motion(z).mean()))
    found = torch.linalg.solve_triangular(root.mT, vectors, upper=True).mT @ basis
    A = found[:, : dimension**2].unflatten(1, (dimension, dimension)) / torch.outer(size, size)
    rows = torch.cat([A.flatten(1), found[:, dimension**2 :] / size - A @ centre], 1)  # in x
    return squares.clamp_min(0).sqrt(), rows / rows.norm(dim=1, keepdim=True)


def _gram(t: Tensor) -> Tensor:
    return t.mT @ t


def begin(conserved: Quadratic, trajectories: Tensor, start: float) -> None:
    """Set quantities to the candidates before the largest jump of the drift, at size ``start``; all others to a thousandth of it."""
    x = (trajectories.cpu() / conserved.size.cpu()).double()
    drifts, directions = least_drift(x)
    (count,) = cuts(drifts, min(len(conserved.b), len(drifts) - 1), 1)
    basis = torch.linalg.qr(directions[: len(conserved.b)].mT)[0].mT
    basis[:count] *= start
    basis[count:] *= 1e-3 * start
    square = x.shape[2] ** 2
    with torch.no_grad():
        conserved.raw.copy_(basis[:, :square].unflatten(1, (x.shape[2], -1)))
        conserved.shift.copy_(basis[:, square:])


def monomials(dimension: int) -> Tensor:
    """An orthonormal basis (D, M M + M) of all symmetric A and all b."""
    one = torch.eye(dimension**2 + dimension, dtype=torch.float64)
    rows, columns = torch.triu_indices(dimension, dimension)
    quadratic = one[rows * dimension + columns] + one[columns * dimension + rows]
    return torch.cat([quadratic / quadratic.norm(dim=1, keepdim=True), one[dimension**2 :]])


def cuts(drifts: Tensor, most: int, count: int) -> list[int]:
    """The ``count`` largest jumps of the drift among the first ``most``, in ascending order: candidates of like drift belong together."""
    raised = drifts[: most + 1] + NEGLIGIBLE
    jumps = raised[1:] / raised[:-1]
    return sorted(int(i) + 1 for i in jumps.topk(min(count, len(jumps))).indices)


def pairs_of_bodies(features: int, bodies: int, space: int) -> Tensor:
    """Which coordinates a feature sees, (F, M): the positions of two bodies, or the momentum of one.

    Nothing in it knows of distances: a feature of two positions is a function of four numbers, if bodies are in the plane.
    """
    of_pair = [torch.isin(torch.arange(bodies), torch.tensor(pair)) for pair in combinations(range(bodies), 2)]
    alone = list(torch.eye(bodies, dtype=torch.bool))
    nothing = torch.zeros(bodies, dtype=torch.bool)
    kinds = [torch.cat([seen, nothing]) for seen in of_pair], [torch.cat([nothing, seen]) for seen in alone]
    rows = [kinds[f % 2][f // 2 % len(kinds[f % 2])] for f in range(features)]
    return torch.stack(rows).repeat_interleave(space, 1)
