"""Coordinates of weights in which steps are even: those of anchor values, whose basis functions overlap."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Frame(nn.Module):
    """Coordinates v of anchor values u in which steps are even: basis functions overlap, so that equal steps of u are not.

        phi phi^T = E diag(lambda) E^T,    v = u E lambda^(1/2):    |u phi|^2 = |v|^2,    |u|^2 = sum_i v_i^2 / lambda_i

    A step of v moves the weights u phi by its own length, and the prior N(0, 1 / delta) of u is one of v, of precision delta / lambda.
    (Eigenvalues below a millionth of the largest count as that: along those a step moves the weights by less.) Coordinates stay while a
    basis is learned: they are those of the basis as it was made. Eigenvectors are unique only up to sign: checkpoints keep them.
    """

    spectrum: Tensor
    forth: Tensor
    back: Tensor

    def __init__(self, phi: Tensor, across: bool):
        super().__init__()
        self.across = across
        spectrum, vectors = torch.linalg.eigh(phi.double() @ phi.double().mT)
        spectrum = spectrum.clamp_min(1e-6 * spectrum.max())
        self.register_buffer("spectrum", spectrum.to(phi))
        self.register_buffer("forth", (vectors * spectrum.sqrt()).to(phi))
        self.register_buffer("back", (vectors / spectrum.sqrt()).mT.to(phi))

    def unit(self, u: Tensor, size: float) -> float:
        """The root mean square of v, or, of zeros, what steps of u of ``size`` move it by."""
        return float(self.coordinates(u).square().mean().sqrt()) or size * float(self.spectrum.mean().sqrt())

    def coordinates(self, u: Tensor) -> Tensor:
        """v of u."""
        return self._along(u, lambda last: last @ self.forth)

    def values(self, v: Tensor) -> Tensor:
        """u of v."""
        return self._along(v, lambda last: last @ self.back)

    def slope(self, g: Tensor) -> Tensor:
        """The gradient in v, from that in u."""
        return self._along(g, lambda last: last @ self.back.mT)

    def precision(self, delta: Tensor) -> Tensor:
        """Of the coordinates, from that of the values."""
        return self._along(delta, lambda last: last / self.spectrum)

    def _along(self, t: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """With the anchors as the last axis: they run along the inputs of the matrix, of which each has as many, or its outputs."""
        last = t.unflatten(-1, (-1, len(self.spectrum))) if self.across else t.mT
        return change(last).flatten(-2) if self.across else change(last).mT
