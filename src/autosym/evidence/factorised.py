"""The log-determinant of a whole network by one matrix: of all weights, or of all rows (samples times outputs)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from autosym.curvature.gauss_newton import GaussNewton
from autosym.curvature.passes import Pass, budget
from autosym.curvature.verification import verify
from autosym.evidence.laplace import Laplace
from autosym.evidence.rows import COLUMNS, Rows, add_products, outer_is_slower, rows_of

BATCH = 64  # samples whose Jacobian is formed at once, at most


@dataclass(frozen=True)
class Found:
    """log det (I + D^-1/2 H D^-1/2), the effective parameters by name, and how sure the former is (see ``Whole``)."""

    log_det: float
    gamma: Mapping[str, float]
    standard_error: float = 0.0
    truncation: float = 0.0
    probes: int = 0
    steps: int = 0


class Jacobians:
    """R^T J of every path, for a few samples at a time, as many as fit into memory. R is taken at the offset of ``H``."""

    def __init__(self, H: GaussNewton, laplace: Laplace, memory: float | None, alone: bool):
        room = budget(memory, H.device)
        self.batch = int(
            min(max(room / (32 * float(laplace.sizes.sum()) * laplace.outputs), 1), BATCH)
        )  # four copies in float64
        gib = room / 2**30 / laplace.outputs
        seen = (H.model, H.data, H.likelihood, self.batch, partial(verify, H.model))
        self.shown = Pass(*seen, memory=gib, alone=alone)
        self.outputs = None if H.offset is None else H.along()[0]

    def __iter__(self) -> Iterator[list[Rows]]:
        for x, _, _, places in self.shown:
            for part, where in zip(x.split(self.batch), places.split(self.batch), strict=True):  # a loader has its own batches
                yield self.of(part, where)

    def of(self, x: Tensor, places: Tensor) -> list[Rows]:
        """Those of the samples x at these places in the data."""
        at = None if self.outputs is None else self.outputs[places.to(self.outputs.device)]
        return rows_of(self.shown.model, x, self.shown.likelihood, None, self.batch, at)


def by_weights(H: GaussNewton, laplace: Laplace, precision: Mapping[str, float], memory: float | None) -> Found:
    """By a matrix of all weights, summed over samples."""
    names = [site.name for site in H.sites if site.name not in laplace.left_out]
    scale, sizes = float(H.likelihood.scale().detach()), [laplace.parameters[name].numel() for name in names]
    total = torch.zeros(sum(sizes), sum(sizes), dtype=torch.float64, device=H.device)
    for paths in Jacobians(H, laplace, memory, alone=True):
        rows = {path.name: path for path in paths}
        whitened = torch.cat([rows[name].finite().dense().double() * (scale / precision[name]) ** 0.5 for name in names], 1)
        add_products(total, whitened.mT)
    root = _root(total)
    log_det, root = _log_det(root), root.to(H.parameters[0].dtype)
    inverse = torch.linalg.solve_triangular(root, torch.eye(len(root), dtype=root.dtype, device=root.device), upper=False)
    kept = inverse.square().sum(0, dtype=torch.float64)  # the diagonal of (I + H)^-1: what the data leave to the prior
    gamma = {name: float((1 - part).sum()) for name, part in zip(names, kept.split(sizes), strict=True)}
    return Found(log_det, gamma)


def by_rows(H: GaussNewton, laplace: Laplace, precision: Mapping[str, float], memory: float | None) -> Found:
    """By a matrix of all samples and outputs, summed over paths. Paths of few weights are joined, of others outer products are kept.

    Its products are in float64: rounding of large eigenvalues would else be larger than the identity. Effective parameters are sums of
    squares, for which the model's own precision will do: |L^-1 J|^2 = tr (I + K)^-1 J J^T.
    """
    jacobians = Jacobians(H, laplace, memory, alone=True)
    shown = [(x, places) for x, _, _, places in jacobians.shown]
    x, places = torch.cat([x for x, _ in shown]), torch.cat([places for _, places in shown])
    scale = float(H.likelihood.scale().detach())
    paths = [path.finite() for path in jacobians.of(x, places) if path.name not in laplace.left_out]
    few = [p for p in paths if p.inputs is None or outer_is_slower(p.gradients.shape[2], p.inputs.shape[2])]
    many = [path.double() for path in paths if all(path is not other for other in few)]
    joined = [path.dense() * (scale / precision[path.name]) ** 0.5 for path in few]
    total = torch.zeros(len(paths[0]), len(paths[0]), dtype=torch.float64, device=H.device)
    for dense in joined:
        for part in dense.split(COLUMNS, 1):
            add_products(total, part.double())
    for path in many:
        path.add_kernel(total, scale / precision[path.name])
    root = _root(total)
    log_det, own = _log_det(root), root.to(H.parameters[0].dtype)
    gamma = {}
    for path, dense in zip(few, joined, strict=True):
        parts = (torch.linalg.solve_triangular(own, part, upper=False) for part in dense.split(COLUMNS, 1))
        gamma[path.name] = float(sum(part.square().sum(dtype=torch.float64) for part in parts))
    inverse = torch.cholesky_inverse(root).tril_().mul_(2) if many else root
    inverse.diagonal().mul_(0.5)  # so that products with the lower part of a symmetric matrix count its upper part too
    for path in many:
        spent = sum(float((tile * inverse[begin:end, :end]).sum()) for begin, end, tile in path.tiles())
        gamma[path.name] = scale / precision[path.name] * spent
    return Found(log_det, gamma)


def _root(matrix: Tensor) -> Tensor:
    """The Cholesky factor of I + ``matrix``, of which the lower part is read, and which is overwritten."""
    matrix.diagonal().add_(1)
    return torch.linalg.cholesky(matrix)


def _log_det(root: Tensor) -> float:
    return 2 * float(root.diagonal().log().sum())
