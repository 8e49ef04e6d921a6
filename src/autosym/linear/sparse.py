"""Sparse paths: weights as sums of basis functions around anchor points (Eqs. 6, 7).

    w(t) = sum_j u_j phi_j(t),       phi_j(t) = exp(-omega^2 |t - z_j|^2 / 2)

``weight`` holds the anchor values u. ``through(x, phi)`` is the path on a given basis; on slopes of the basis it is the
derivative of the output in the parameters of the basis. Curvature follows from the path law: columns (or rows) are projected
on the basis.

omega is an *inverse* lengthscale. With anchors at every position, a large omega gives the dense form; omega = 0 is constant in
space. It is fixed by default. With ``learn_omega`` it is a parameter with a prior N(0, 1 / delta) and its own exact Gauss-Newton
block. With ``learn_z`` the same holds for the displacements of the anchors.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from autosym.linear.circular import circular_conv, patches, wrap
from autosym.linear.frames import Frame
from autosym.linear.path import Definition, Kept, Path, Tangents
from autosym.linear.plain import Convolution

SMOOTH = 0.1  # initial anchor values ignore directions that the basis shrinks below this share: they would need huge values
NOTHING = 1e-30  # values of a basis function below this count as zero; its largest value is 1


class Basis(nn.Module):
    """phi: (P, T), Gaussians around the anchor locations z + ``shift`` (P, 2) on ``positions`` (T, 2), in pixels."""

    z: Tensor
    omega: Tensor
    shift: Tensor | None
    positions: Tensor

    def __init__(self, positions: Tensor, anchors: int, learn_omega: bool = False, learn_z: bool = False):
        super().__init__()
        if not 1 <= anchors <= len(positions):
            raise ValueError(f"the number of anchors must lie between 1 and the {len(positions)} positions, got {anchors}")
        self.register_buffer("positions", positions, persistent=False)
        self.register_buffer("z", spread(positions, anchors))
        if learn_omega:
            self.omega = nn.Parameter(torch.ones(()))
        else:
            self.register_buffer("omega", torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(anchors, 2)) if learn_z else None
        self._kept: tuple[tuple, Tensor] | None = None

    def forward(self) -> Tensor:
        """phi, cached until omega or z changes. Not cached if they are learned: a replayed CUDA graph changes them unseen."""
        if isinstance(self.omega, nn.Parameter) or self.shift is not None:
            return self._gaussians()
        key = (self.omega._version, id(self.omega), self.z._version, id(self.z), self.omega.dtype, self.omega.device)
        if self._kept is None or self._kept[0] != key:
            with torch.inference_mode(False):  # the cached phi serves training too
                self._kept = (key, self._gaussians())
        return self._kept[1]

    def made(self) -> Tensor:
        """phi at the initial values of learned parameters: omega = 1, anchors not displaced."""
        omega = torch.ones_like(self.omega) if isinstance(self.omega, nn.Parameter) else self.omega
        return _gaussians(omega, (self.positions - self.z[:, None]).square().sum(-1))

    @torch.no_grad()
    def slopes(self, name: str) -> Tensor:
        """d phi / d omega, (1, P, T), or d phi / d shift, (2P, P, T), with one non-zero row, for the anchor."""
        if name == "omega":
            return (-self.omega * self._square_distances() * self._gaussians())[None]
        rows = self.omega**2 * (self._offsets() * self._gaussians()[..., None]).movedim(-1, 1)  # (P, 2, T)
        return (torch.eye(len(rows)).to(rows)[:, None, :, None] * rows[:, :, None]).flatten(0, 1)

    @torch.no_grad()
    def fit(self, target: Tensor, rcond: float | None = None) -> Tensor:
        """u (..., P): least-squares fit of u phi to dense weights (..., T), without directions that phi shrinks below ``rcond``."""
        if target.is_meta:
            return target[..., : len(self.z)]
        phi = self().double()
        return torch.linalg.lstsq(phi.mT, target.flatten(0, -2).mT.double(), rcond=rcond, driver="gelsd").solution.mT.reshape(
            *target.shape[:-1], len(phi)
        )

    def _offsets(self) -> Tensor:
        z = self.z if self.shift is None else self.z + self.shift
        return self.positions - z[:, None]

    def _square_distances(self) -> Tensor:
        return self._offsets().square().sum(-1)

    def _gaussians(self) -> Tensor:
        return _gaussians(self.omega, self._square_distances())


def _gaussians(omega: Tensor, square_distances: Tensor) -> Tensor:
    """Exactly zero far from an anchor: on a CPU, numbers near the smallest float make products 90 times slower."""
    values = torch.exp(-0.5 * omega**2 * square_distances)
    return torch.where(values > NOTHING, values, 0.0)


class Sparse(Path):
    """Anchor values u of a function w = u phi of space. Steps are measured in w, because u can be far larger."""

    basis: Basis
    across = True  # whether anchors run along the inputs of the matrix (else along its outputs)

    def through(self, x: Tensor, basis: Tensor) -> Tensor:
        """The path on a given basis."""
        raise TypeError(f"{type(self).__name__} does not define through")

    def forward(self, x: Tensor) -> Tensor:
        return self.through(x, self.basis())

    def definition(self, name: str) -> Callable[[Tensor], Definition] | None:
        if not name.startswith("basis."):
            return super().definition(name)

        def tangents(x: Tensor) -> Tangents:
            with torch.set_grad_enabled(x.requires_grad):
                return Tangents(torch.stack([self.through(x, t) for t in self.basis.slopes(name.removeprefix("basis."))], 1))

        return tangents

    @torch.no_grad()
    def pictures(self) -> Tensor:
        height, width = (self.basis.positions.amax(0) - self.basis.positions.amin(0) + 1).int().tolist()
        phi, u = self.basis().double(), self.weight.double()
        return ((u.reshape(-1, len(phi)) if self.across else u.mT) @ phi).reshape(-1, height, width)

    @torch.no_grad()
    def frame(self) -> Frame:
        """The coordinates in which the anchor values take steps."""
        return Frame(self.basis.made(), self.across)

    @torch.no_grad()
    def size(self) -> float:
        """rms(w) / rms(change of w if every u takes a unit step of random sign)."""
        phi = self.basis()
        u = self.weight if self.across else self.weight.mT
        w = u.unflatten(-1, (-1, len(phi))) @ phi
        return float((w.square().mean() / phi.square().sum(0).mean()).sqrt()) or self.start_size


class SparseConv(Sparse):
    """S-CONV (Eq. 6) at stride 1 with circular padding: u of shape (1, C', C P); columns are patches projected on the basis."""

    keeps = Kept(equivariant=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        anchors: int,
        learn_omega: bool = False,
        learn_z: bool = False,
    ):
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size {kernel_size} is even: a centred filter has an odd one")
        basis = Basis(grid(kernel_size, kernel_size), anchors, learn_omega, learn_z)  # first: it checks the anchors
        super().__init__(1, out_channels, in_channels * anchors, bound=0.0)
        self.in_channels, self.kernel_size, self.basis = in_channels, kernel_size, basis
        bound = math.sqrt(6 / (in_channels * kernel_size**2))
        dense = torch.empty(out_channels, in_channels, kernel_size**2).uniform_(-bound, bound)
        self.weight.data.copy_(self.basis.fit(dense, SMOOTH).flatten(1))

    def columns(self, x: Tensor) -> Tensor:
        kernel = (self.kernel_size, self.kernel_size)
        seen = patches(wrap(x, kernel), kernel).flatten(4)  # (B, C, H, W, k^2)
        return torch.einsum("bchwt,pt->bhwcp", seen, self.basis().detach()).reshape(len(x), -1, 1, self.weight.shape[2])

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return h[:, :, 0].mT.reshape(len(h), -1, *x.shape[-2:])

    def rows(self, g: Tensor) -> Tensor:
        return g.flatten(2).mT[:, :, None]

    def filters(self, basis: Tensor | None = None) -> Tensor:
        """The weight in torch's shape, (C', C, k, k), on a given basis or the path's own."""
        basis = self.basis() if basis is None else basis
        filters = self.weight.view(-1, self.in_channels, len(basis)) @ basis
        return filters.unflatten(-1, (self.kernel_size, self.kernel_size))

    def through(self, x: Tensor, basis: Tensor) -> Tensor:
        return circular_conv(x, self.filters(basis))

    def plain(self, in_shape: Sequence[int] | None) -> Convolution:
        reach = self.kernel_size // 2
        return Convolution(self.filters(), (reach, reach, reach, reach))


class SparseIn(Sparse):
    """The input factor of S-FC (Eq. 7): u_2 of shape (C, C', P); columns are inputs projected on the basis."""

    def __init__(
        self, in_shape: Sequence[int], out_channels: int, anchors: int, learn_omega: bool = False, learn_z: bool = False
    ):
        channels, height, width = _planar(in_shape)
        basis = Basis(grid(height, width), anchors, learn_omega, learn_z)
        super().__init__(channels, out_channels, anchors, bound=0.0)
        self.in_shape, self.basis = tuple(in_shape), basis
        bound = math.sqrt(3 / (height * width))
        dense = torch.empty(channels, out_channels, height * width).uniform_(-bound, bound)
        self.weight.data.copy_(self.basis.fit(dense, SMOOTH))

    def columns(self, x: Tensor) -> Tensor:
        return (x.flatten(2) @ self.basis().detach().mT)[:, None]

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return h[:, 0].mT

    def rows(self, g: Tensor) -> Tensor:
        return g.mT[:, None]

    def through(self, x: Tensor, basis: Tensor) -> Tensor:
        return ((x.flatten(2) @ basis.mT).transpose(0, 1) @ self.weight.mT).permute(1, 2, 0)


class SparseOut(Sparse):
    """The output factor of S-FC (Eq. 7): u_1 of shape (C', P, C); rows are cotangents projected on the basis."""

    across = False
    factored = True

    def __init__(
        self, in_channels: int, out_shape: Sequence[int], anchors: int, learn_omega: bool = False, learn_z: bool = False
    ):
        channels, height, width = _planar(out_shape)
        basis = Basis(grid(height, width), anchors, learn_omega, learn_z)
        super().__init__(channels, anchors, in_channels, bound=0.0)
        self.out_shape, self.basis = tuple(out_shape), basis
        bound = math.sqrt(3 / in_channels)
        dense = torch.empty(channels, in_channels, height * width).uniform_(-bound, bound)
        self.weight.data.copy_(self.basis.fit(dense, SMOOTH).mT)

    def columns(self, x: Tensor) -> Tensor:
        return x[:, None]

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return (h[:, 0] @ self.basis()).reshape(len(h), *self.out_shape)

    def rows(self, g: Tensor) -> Tensor:
        return (g.flatten(2) @ self.basis().detach().mT)[:, None]

    def through(self, x: Tensor, basis: Tensor) -> Tensor:
        values = (x.transpose(0, 1) @ self.weight.mT).transpose(0, 1)  # (B, C', P)
        return (values @ basis).reshape(len(x), *self.out_shape)


def _planar(shape: Sequence[int]) -> tuple[int, int, int]:
    """(channels, height, width) of a map; a sequence is a map of height 1."""
    if not 2 <= len(shape) <= 3:
        raise ValueError(f"a sparse path has anchors on sequences and images, not on maps {tuple(shape)}: use f-fc or fc")
    channels, height, width = (shape[0], *(1, *shape[1:])[-2:])
    return channels, height, width


def grid(height: int, width: int) -> Tensor:
    """The pixels of a grid, centred at 0: (HW, 2)."""
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([row - (height - 1) / 2, column - (width - 1) / 2], -1).reshape(-1, 2)


def spread(positions: Tensor, count: int) -> Tensor:
    """``count`` positions that lie far apart: first the most central one, then always the farthest from those chosen."""
    if positions.is_meta or count == len(positions):
        return positions[:count].clone()
    chosen = [int(positions.square().sum(-1).argmin())]
    nearest = torch.full((len(positions),), math.inf)
    while len(chosen) < count:
        nearest = torch.minimum(nearest, (positions - positions[chosen[-1]]).square().sum(-1))
        chosen.append(int(nearest.argmax()))
    return positions[chosen].clone()
