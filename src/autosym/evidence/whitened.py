"""The Gauss-Newton matrix of a whole network in coordinates in which it is near to the identity, for probes and conjugate gradients.

    A = B^T (H + D) B,  B B^T = (t kron(G, A) + D)^-1               Kronecker factors: cheap, path by path
    C^-1/2 A C^-1/2,    C = I + c R^T R                             and R, the Jacobian of a few samples: what paths have in common

Both are symmetric and positive, and their determinants are known: log det (H + D) = -2 log det B + log det C + that of the last.
"""

import math
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from autosym.curvature.gauss_newton import GaussNewton
from autosym.evidence.factorised import Jacobians
from autosym.evidence.laplace import Laplace
from autosym.evidence.rows import Rows
from autosym.runtime import processes

STRENGTH = (
    0.01  # t: of the Kronecker factors in the preconditioner. A small spectrum below 1 takes more steps than a large one above
)
TRACE = 2e10  # multiplications: with more, the mean of z^T A z costs too much
ROWS, NUMBERS = 1024, 2**28  # of R, at most: samples times outputs, and rows times weights (1 GiB in float32)


class Whitened:
    """v -> B^T (H + D) B v, with B B^T = (t kron(G, A) + D)^-1 for every path.

    B is U (t lambda mu + delta)^-1/2 V^T in the eigenbasis of the factors. D becomes ``kept``, the diagonal delta / (t lambda mu +
    delta), so no eigenvalue is below its ``least``. Weights that the evidence leaves out stay zero.
    """

    def __init__(self, H: GaussNewton, laplace: Laplace, precision: Mapping[str, float]):
        self.H, self.laplace, self.scale = H, laplace, float(laplace.likelihood.scale().detach())
        self.names, self.left_out = [site.name for site in H.sites], laplace.left_out  # their part of a probe is zero
        self.parts: list[tuple[Tensor, Tensor, Tensor] | None] = []
        kept: list[Tensor] = []
        self.log_det = 0.0
        decomposed = laplace.curvature.eigenvectors({})
        for site in H.sites:
            if site.name in laplace.left_out:
                self.parts.append(None)
                kept.append(torch.ones(site.parameter.numel(), dtype=torch.float64, device=H.device))
                continue
            products, U, V = (t.to(H.device) for t in decomposed[site.name])
            ratio = STRENGTH * self.scale / precision[site.name] * products
            self.log_det += float(ratio.log1p().sum())
            self.parts.append((((1 + ratio) * precision[site.name]).rsqrt(), U, V))
            kept.append((1 / (1 + ratio)).flatten())
        self.kept = torch.cat(kept)
        self.width = max((max(d.shape[1:]) for d, _, _ in filter(None, self.parts)), default=1)  # of the largest basis
        self.least = float(self.kept.min()) * (1 - 1e-6)

    def __call__(self, v: Tensor) -> Tensor:
        return self.kept * v + self.scale * self.turned(self.H(self.turned(v, back=False)), back=True)

    def turned(self, vectors: Tensor, back: bool) -> Tensor:
        """B v, or B^T v, for each row v."""
        found = []
        for part, piece in zip(self.parts, vectors.split(self.H.sizes, 1), strict=True):
            if part is None:
                found.append(torch.zeros_like(piece))
                continue
            d, U, V = part
            w = piece.view(len(piece), *d.shape)
            found.append(((U.mT @ w @ V) * d if back else U @ (w * d) @ V.mT).flatten(1))
        return torch.cat(found, 1)

    def jacobian(self, paths: list[Rows]) -> Tensor:
        """R^T J B of these rows, times the root of the scale: A is ``kept`` and the sum of all rows' outer products."""
        rows = {path.name: path for path in paths}
        found = []
        for name, size, part in zip(self.names, self.H.sizes, self.parts, strict=True):
            if part is None:
                found.append(self.kept.new_zeros(len(rows[name]), size))
            else:
                found.append(math.sqrt(self.scale) * _turned_rows(rows[name].finite().double(), *part))
        return torch.cat(found, 1)

    def probes(self, seed: int, begin: int, count: int) -> Tensor:
        """Random signs (count, weights). A path of the same name and size has the same ones in another network."""
        found = []
        for name, size in zip(self.names, self.H.sizes, strict=True):
            signs = []
            for number in range(begin, begin + count):
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {number} {name}".encode()))
                signs.append(2.0 * torch.randint(2, (size,), generator=generator) - 1)
            found.append(torch.stack(signs) * (name not in self.left_out))
        return torch.cat(found, 1).to(self.H.device, torch.float64)


class Preconditioned:
    """v -> C^-1/2 A C^-1/2 v for ``whitened`` A, with C = I + c R^T R, R the whitened Jacobian of every s-th sample, and c = sqrt(s).

    C^-1/2 = I + R^T F R, with F of as many rows as R. As A is at least ``kept`` + R^T R, no eigenvalue is below the least of ``kept``, or
    1 / c: ``least``.
    """

    def __init__(self, whitened: Whitened, memory: float | None = None):
        self.whitened, self.H, self.kept = whitened, whitened.H, whitened.kept
        self.rows, factor = _some_rows(whitened, memory)
        gram = (self.rows @ self.rows.mT).double()
        values, vectors = torch.linalg.eigh(gram)
        values = factor * values.clamp_min(0)
        root = (1 + values).sqrt()
        self.root = (vectors * (-factor / (root * (1 + root)))) @ vectors.mT
        self.spent = (vectors * (factor / (1 + values))) @ vectors.mT  # I - C^-1 = R^T spent R
        self.least = min(whitened.least, 1 / factor)
        self.log_det = whitened.log_det + float(values.log1p().sum())

    def __call__(self, v: Tensor) -> Tensor:
        return self.half(self.whitened(self.half(v)))

    def probes(self, seed: int, begin: int, count: int) -> Tensor:
        """Random signs (count, weights): those of the whitened matrix."""
        return self.whitened.probes(seed, begin, count)

    def half(self, v: Tensor) -> Tensor:
        """C^-1/2 v for each row v."""
        return v + ((v.to(self.rows) @ self.rows.mT).double() @ self.root).to(self.rows) @ self.rows

    @property
    def cheap_trace(self) -> bool:
        """Whether the mean of z^T A z costs little beside the products."""
        laplace = self.whitened.laplace
        rows = laplace.samples * laplace.outputs
        return rows * sum(self.H.sizes) * (len(self.rows) + self.whitened.width) <= TRACE

    def trace(self, memory: float | None) -> float:
        """The mean of z^T C^-1/2 A C^-1/2 z over all probes, from all rows of the Jacobian."""
        jacobians = Jacobians(self.H, self.whitened.laplace, memory, alone=False)
        total = torch.zeros((), dtype=torch.float64, device=self.H.device)
        with processes.agreeing():
            for paths in jacobians:
                total += self.half(self.whitened.jacobian(paths)).square().sum()
        jacobians.shown.finish(total)
        counted = zip(self.whitened.parts, self.kept.split(self.H.sizes), strict=True)
        kept = torch.cat([k * (part is not None) for part, k in counted])
        beside = (self.rows * kept.to(self.rows)) @ self.rows.mT
        return float(total + kept.sum() - (self.spent * beside).sum())

    def gammas(self, z: Tensor, x: Tensor) -> Tensor:
        """The effective parameters (k, paths) by each probe, from x = (C^-1/2 A C^-1/2)^-1 z: sums of 1 - (kept A^-1)_ii over a path.

        What C alone says of them is known; chance is in the rest only.
        """
        own, solved = self.half(z), self.half(x)
        chance = (own.square() - self.kept * own * solved).split(self.H.sizes, 1)
        known = [(self.spent * (rows @ rows.mT)).sum() for rows in self.rows.split(self.H.sizes, 1)]
        return torch.stack([part.sum(1) + by_rows for part, by_rows in zip(chance, known, strict=True)], 1)


def _some_rows(whitened: Whitened, memory: float | None) -> tuple[Tensor, float]:
    """The whitened Jacobian of every s-th sample, (rows, weights), with at most ``ROWS`` rows and ``NUMBERS`` numbers, and sqrt(s)."""
    laplace, H = whitened.laplace, whitened.H
    weights, kind = sum(H.sizes), H.parameters[0].dtype
    count = min(ROWS, NUMBERS // weights) // laplace.outputs
    if not count:
        return torch.zeros(0, weights, dtype=kind, device=H.device), 1.0
    step = math.ceil(laplace.samples / count)
    jacobians = Jacobians(H, laplace, memory, alone=True)
    found = []
    for x, _, _, places in jacobians.shown:
        for part in (places % step == 0).nonzero().flatten().split(jacobians.batch):
            if not len(part):
                continue
            found.append(whitened.jacobian(jacobians.of(x[part.to(x.device)], places[part])).to(kind))
    return torch.cat(found), math.sqrt(step)


def _turned_rows(rows: Rows, d: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """U^T w V d of all rows w, (rows, weights)."""
    if rows.inputs is None:
        return ((U.mT @ rows.gradients.view(-1, *d.shape) @ V) * d).flatten(1)
    g, a = rows.gradients @ U, rows.inputs @ V  # w is an outer product
    return (torch.einsum("kro,kri->rkoi", g, a.repeat_interleave(len(rows) // a.shape[1], 1)) * d).flatten(1)
