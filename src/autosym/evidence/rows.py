"""R^T J, the Jacobian of a network row by row: a row belongs to a sample and an output (or a column of R).

    K = sum over paths of J J^T / delta,        J v,        J^T u

Where a path has one position, a row is an outer product, of which one vector is the same for all outputs of a sample. Its products with
other rows need that vector once for each sample, and never the row itself.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from autosym.bayes.likelihoods import Likelihood
from autosym.curvature.verification import linearised
from autosym.runtime.arithmetic import NotFinite

PANEL, COLUMNS = 512, 4096  # rows of a symmetric product that are formed at once, and columns that are converted at once
TILE = 2**18  # numbers of a product of outer products that are formed at once: as many as stay near the processor
MOVED = 40  # multiplications in the time in which such a number is read and written a few times


@dataclass(frozen=True)
class Rows:
    """R^T J of one path for some samples, row by row, those of a sample after each other.

    ``gradients`` is (rows, weights). With ``inputs`` (K, samples, in), which has one position, it is (K, rows, out), and a row is the outer
    product of both.
    """

    name: str
    gradients: Tensor
    inputs: Tensor | None = None

    def __len__(self) -> int:
        return self.gradients.shape[0 if self.inputs is None else 1]

    def kernel(self) -> Tensor:
        """The products of all rows with each other, (rows, rows) in float64."""
        if self.inputs is None:
            found = (self.gradients @ self.gradients.mT).double()
        else:
            found = torch.zeros(len(self), len(self), dtype=torch.float64, device=self.gradients.device)
            self.add_kernel(found)
            found = symmetric(found)
        if not torch.isfinite(found).all():
            raise NotFinite(
                f"the kernel of {self.name} overflowed {self.gradients.dtype}: rescale the inputs or the targets, or use model.double()"
            )
        return found

    def add_kernel(self, total: Tensor, factor: float = 1.0) -> None:
        """Add ``factor`` times the products of all rows with each other to the lower part of ``total`` (rows, rows), in place."""
        if self.inputs is None:
            for part in self.gradients.split(COLUMNS, 1):
                add_products(total, part.to(total.dtype) * math.sqrt(factor))
            return
        for begin, end, tile in self.tiles():
            total[begin:end, :end].add_(tile, alpha=factor)

    def tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        """Begin and end of some rows, and a part of their products with all rows before the end. With ``inputs``; parts add up."""
        assert self.inputs is not None
        samples = self.inputs.shape[1]
        each = len(self) // samples
        step = max(TILE // (each * len(self)), 1)
        for t, a in zip(self.gradients, self.inputs, strict=True):
            alike = a @ a.mT
            for begin in range(0, samples, step):
                end = min(begin + step, samples)
                tile = t[begin * each : end * each] @ t[: end * each].mT
                tile.view(end - begin, each, end, each).mul_(alike[begin:end, None, :end, None])
                yield begin * each, end * each, tile

    def along(self, vectors: Tensor) -> Tensor:
        """J v (k, rows) for ``vectors`` v (k, weights)."""
        vectors = vectors.to(self.gradients)
        if self.inputs is None:
            return vectors @ self.gradients.mT
        found = vectors.new_zeros(self.inputs.shape[1], len(self) // self.inputs.shape[1], len(vectors))
        blocks = vectors.view(len(vectors), len(self.inputs), -1, self.inputs.shape[2]).transpose(0, 1)
        for t, a, v in zip(self.gradients, self.inputs, blocks, strict=True):
            found += t.view(*found.shape[:2], -1) @ (a @ v.mT).permute(1, 2, 0)  # (n, each, out) and (n, out, k)
        return found.flatten(0, 1).mT

    def back(self, cotangents: Tensor) -> Tensor:
        """J^T u (k, weights) for ``cotangents`` u (k, rows)."""
        cotangents = cotangents.to(self.gradients)
        if self.inputs is None:
            return cotangents @ self.gradients
        u = cotangents.view(len(cotangents), self.inputs.shape[1], -1).transpose(0, 1)  # (n, k, each)
        found = []
        for t, a in zip(self.gradients, self.inputs, strict=True):
            g = u @ t.view(*u.shape[::2], -1)  # (n, k, out)
            found.append(torch.einsum("nko,ni->koi", g, a))
        return torch.stack(found, 1).flatten(1)

    def finite(self) -> "Rows":
        """The same; a NotFinite if numbers overflowed."""
        if not all(torch.isfinite(t).all() for t in (self.gradients, self.inputs) if t is not None):
            raise NotFinite(
                f"the Jacobian of {self.name} overflowed {self.gradients.dtype}: rescale the inputs or the targets, or use model.double()"
            )
        return self

    def double(self) -> "Rows":
        """The same in float64."""
        return Rows(self.name, self.gradients.double(), None if self.inputs is None else self.inputs.double())

    def dense(self) -> Tensor:
        """(rows, weights)."""
        if self.inputs is None:
            return self.gradients
        a = self.inputs.repeat_interleave(len(self) // self.inputs.shape[1], 1)
        return torch.einsum("kro,kri->rkoi", self.gradients, a).flatten(1)


def rows_of(
    model: nn.Module,
    x: Tensor,
    likelihood: Likelihood,
    chosen: Tensor | None,
    batch_size: int,
    outputs: Tensor | None = None,
) -> list[Rows]:
    """R^T J of every path at inputs x. Rows are samples times the columns of R, of which one may be ``chosen`` for each sample.

    R is taken at ``outputs`` (B, D), by default those of the model.
    """
    parts: dict[str, list[Tensor]] = {}
    inputs: dict[str, list[Tensor]] = {}
    for begin in range(0, len(x), batch_size):
        inside = slice(begin, begin + batch_size)
        root = likelihood.root if chosen is None else partial(_one_column, likelihood, chosen[inside])
        if outputs is not None:
            root = partial(_given, root(outputs[inside]))
        for name, (columns, g) in linearised(model, x[inside], root)[1].items():
            if columns.shape[1] == 1:  # one position: the kernel is a product, gradients are not needed
                inputs.setdefault(name, []).append(columns[:, 0].transpose(0, 1))
                parts.setdefault(name, []).append(g[:, :, 0].flatten(0, 1).transpose(0, 1))
            else:
                parts.setdefault(name, []).append(torch.einsum("bcsko,bski->bckoi", g, columns).flatten(2).flatten(0, 1))
    joined = {name: torch.cat(found, 1) for name, found in inputs.items()}
    return [Rows(name, torch.cat(found, int(name in joined)), joined.get(name)) for name, found in parts.items()]


def _given(root: Tensor, f: Tensor) -> Tensor:
    return root.to(f)


def _one_column(likelihood: Likelihood, chosen: Tensor, f: Tensor) -> Tensor:
    return likelihood.column(f, chosen)[:, :, None]


def outer_is_slower(out: int, inside: int) -> bool:
    """Whether products of rows are faster by all weights than by the two vectors of each block, whose numbers have to be moved."""
    return out * inside <= out + MOVED


def add_products(total: Tensor, rows: Tensor) -> None:
    """Add all products of ``rows`` with each other to the lower part of ``total``, in place."""
    for begin in range(0, len(rows), PANEL):
        end = min(begin + PANEL, len(rows))
        total[begin:end, :end].addmm_(rows[begin:end], rows[:end].mT)


def symmetric(lower: Tensor) -> Tensor:
    """The symmetric matrix with this lower part."""
    return lower.tril() + lower.tril(-1).mT
