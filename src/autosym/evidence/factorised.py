"""The log-determinant of a whole network by one matrix: of all weights, or of all rows (samples times outputs)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from autosym.curvature.gauss_newton import GaussNewton
from autosym.curvature.passes import Pass, budget
from autosym.curvature.verification import verify
from autosym.evidence.kernel import Rows, rows_of
from autosym.evidence.laplace import Laplace

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
    total: Tensor | None = None
    for paths in Jacobians(H, laplace, memory, alone=True):
        rows = {path.name: path for path in paths}
        whitened = torch.cat([rows[name].dense().double() * precision[name] ** -0.5 for name in names], 1)
        total = whitened.mT @ whitened if total is None else total.addmm_(whitened.mT, whitened)
    assert total is not None
    root = _root(float(H.likelihood.scale().detach()) * total)
    kept = torch.cholesky_inverse(root).diagonal()  # of (I + H)^-1: what the data leave to the prior
    sizes = [laplace.parameters[name].numel() for name in names]
    gamma = {name: float((1 - part).sum()) for name, part in zip(names, kept.split(sizes), strict=True)}
    return Found(2 * float(root.diagonal().log().sum()), gamma)


def by_rows(H: GaussNewton, laplace: Laplace, precision: Mapping[str, float], memory: float | None) -> Found:
    """By a matrix of all samples and outputs, summed over paths. Its parts are formed twice, as they are too large to keep.

    Products are in float64: rounding of large eigenvalues would else be larger than the identity.
    """
    jacobians = Jacobians(H, laplace, memory, alone=True)
    shown = [(x, places) for x, _, _, places in jacobians.shown]
    x, places = torch.cat([x for x, _ in shown]), torch.cat([places for _, places in shown])
    scale, total = float(H.likelihood.scale().detach()), None
    paths = [path for path in jacobians.of(x, places) if path.name not in laplace.left_out]
    for path in paths:
        part = path.double().kernel().mul_(scale / precision[path.name])
        total = part if total is None else total.add_(part)
    assert total is not None
    root = _root(total)
    inverse = torch.cholesky_inverse(root)
    gamma = {path.name: scale / precision[path.name] * float((inverse * path.double().kernel()).sum()) for path in paths}
    return Found(2 * float(root.diagonal().log().sum()), gamma)


def _root(matrix: Tensor) -> Tensor:
    """The Cholesky factor of I + ``matrix``, which is overwritten."""
    matrix.diagonal().add_(1)
    return torch.linalg.cholesky(matrix)
