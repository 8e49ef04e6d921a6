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
from autosym.curvature.passes import choose
from autosym.evidence import costs
from autosym.evidence.factorised import Jacobians
from autosym.evidence.laplace import Laplace
from autosym.evidence.rows import Rows
from autosym.runtime import processes

STRENGTH = (
    0.01  # t: of the Kronecker factors in the preconditioner. A small spectrum below 1 takes more steps than a large one above
)
TRACE = 1e9  # rows times weights: with more, the mean of z^T A z costs too much
ROWS, NUMBERS = 1024, 2**27  # of R, at most: samples times outputs, and rows times weights (half a GiB in float32)
SETUP = 20  # products with A whose work R may take, about: the square of its rows, times the weights
DENSE = 4  # a forward pass of fewer multiplications for each weight is one of dense layers, whose products are cheap


def prepared(H: GaussNewton, laplace: Laplace, precision: Mapping[str, float], memory: float | None) -> "Whitened":
    """The matrix for probes: with the mean of z^T A z where that is cheap beside the products, else with samples in the preconditioner."""
    weights, work = sum(H.sizes), costs.of(H.model, H.data, laplace, memory).forward
    if not has_cheap_mean(laplace) or work >= DENSE * weights:
        rows = min(ROWS, NUMBERS // weights, int(math.sqrt(SETUP * costs.PRODUCT * laplace.samples * work / weights)))
        if count := min(rows // laplace.outputs, laplace.samples):
            return Preconditioned(H, laplace, precision, count, memory)
    return Whitened(H, laplace, precision)


def has_cheap_mean(laplace: Laplace) -> bool:
    """Whether the mean of z^T A z, from all rows of the Jacobian, costs little beside the products."""
    return laplace.samples * laplace.outputs * float(laplace.sizes.sum()) <= TRACE


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

    def mean(self, memory: float | None) -> float | None:
        """The mean of z^T A z over all probes: the sum of squares of R^T J B, and what is kept of D. None if it costs too much."""
        if not has_cheap_mean(self.laplace):
            return None
        jacobians = Jacobians(self.H, self.laplace, memory, alone=False)
        total = torch.zeros((), dtype=torch.float64, device=self.H.device)
        with processes.agreeing():
            for paths in jacobians:
                rows = {path.name: path for path in paths}
                for name, part in zip(self.names, self.parts, strict=True):
                    if part is not None:
                        total += _squares(rows[name].double(), *part)
        jacobians.shown.finish(total)
        kept = zip(self.parts, self.kept.split(self.H.sizes), strict=True)
        return float(self.scale * total + sum(k.sum() for part, k in kept if part is not None))

    def gammas(self, z: Tensor, x: Tensor) -> Tensor:
        """The effective parameters (k, paths) by each probe, from x = A^-1 z: sum of 1 - kept z x over a path."""
        spent = (z.square() - self.kept * z * x).split(self.H.sizes, 1)
        return torch.stack([part.sum(1) for part in spent], 1)

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


class Preconditioned(Whitened):
    """v -> C^-1/2 A C^-1/2 v, with C = I + c R^T R, R the whitened Jacobian of M samples, drawn by lot, and c = sqrt(N / M).

    C^-1/2 = I + R^T F R, with F of as many rows as R. As A is at least ``kept`` + R^T R, no eigenvalue is below the least of ``kept``, or
    1 / c: ``least``.
    """

    def __init__(
        self, H: GaussNewton, laplace: Laplace, precision: Mapping[str, float], samples: int, memory: float | None = None
    ):
        super().__init__(H, laplace, precision)
        factor = math.sqrt(laplace.samples / samples)
        self.rows = self._some_rows(samples, memory)
        grams = [(part @ part.mT).double() for part in self.rows.split(H.sizes, 1)]
        values, vectors = torch.linalg.eigh(sum(grams))
        values = factor * values.clamp_min(0)
        root = (1 + values).sqrt()
        self.root = (vectors * (-factor / (root * (1 + root)))) @ vectors.mT
        spent = (vectors * (factor / (1 + values))) @ vectors.mT  # I - C^-1 = R^T spent R
        self.spent = torch.stack([(spent * gram).sum() for gram in grams])  # its trace, path by path
        self.least = min(self.least, 1 / factor)
        self.log_det += float(values.log1p().sum())

    def __call__(self, v: Tensor) -> Tensor:
        return self.half(super().__call__(self.half(v)))

    def half(self, v: Tensor) -> Tensor:
        """C^-1/2 v for each row v."""
        return v + ((v.to(self.rows) @ self.rows.mT).double() @ self.root).to(self.rows) @ self.rows

    def mean(self, memory: float | None) -> float | None:
        """Not known: it would cost a product of R with all rows of the Jacobian."""
        return None

    def gammas(self, z: Tensor, x: Tensor) -> Tensor:
        """The effective parameters (k, paths) by each probe, from x = (C^-1/2 A C^-1/2)^-1 z: sums of 1 - (kept A^-1)_ii over a path.

        What C alone says of them is known; chance is in the rest only.
        """
        own, solved = self.half(z), self.half(x)
        rest = (own.square() - self.kept * own * solved).split(self.H.sizes, 1)
        return torch.stack([part.sum(1) for part in rest], 1) + self.spent

    def _some_rows(self, samples: int, memory: float | None) -> Tensor:
        """The whitened Jacobian of so many samples, (rows, weights)."""
        jacobians = Jacobians(self.H, self.laplace, memory, alone=True)
        mask = choose(samples, self.laplace.samples, 0)
        assert mask is not None
        found = []
        for x, _, _, places in jacobians.shown:
            for part in mask[places % len(mask)].nonzero().flatten().split(jacobians.batch):
                if len(part):
                    paths = jacobians.of(x[part.to(x.device)], places[part])
                    found.append(self.jacobian(paths).to(self.H.parameters[0].dtype))
        return torch.cat(found)


def _turned_rows(rows: Rows, d: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """U^T w V d of all rows w, (rows, weights)."""
    if rows.inputs is None:
        return ((U.mT @ rows.gradients.view(-1, *d.shape) @ V) * d).flatten(1)
    g, a = rows.gradients @ U, rows.inputs @ V  # w is an outer product
    return (torch.einsum("kro,kri->rkoi", g, a.repeat_interleave(len(rows) // a.shape[1], 1)) * d).flatten(1)


def _squares(rows: Rows, d: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """The sum of squares of U^T w V d over all rows w."""
    if rows.inputs is None:
        return _turned_rows(rows, d, U, V).square().sum()
    g, a = (rows.gradients @ U).square(), (rows.inputs @ V).square()  # w is an outer product
    return ((g.unflatten(1, (a.shape[1], -1)).sum(2) @ d.square()) * a).sum()
