"""Coordinates for steps of anchor values, whose basis functions overlap."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Frame(nn.Module):
    """Coordinates v of anchor values u in which equal steps change the weights equally (basis functions overlap).

        phi phi^T = E diag(lambda) E^T,    v = u E lambda^(1/2):    |u phi|^2 = |v|^2,    |u|^2 = sum_i v_i^2 / lambda_i

    A step of v moves the weights u phi by the same length. The prior N(0, 1 / delta) of u is a prior of v with precision
    delta / lambda. Eigenvalues below a millionth of the largest are raised to it; there a step moves the weights by less. If the
    basis is learned, the coordinates of the initial basis stay. Checkpoints store eigenvectors, because their signs are arbitrary.
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
        """The root mean square of v. If v is zero: how far steps ``size`` of u move v."""
        return float(self.coordinates(u).square().mean().sqrt()) or size * float(self.spectrum.mean().sqrt())

    def coordinates(self, u: Tensor) -> Tensor:
        """v of u."""
        return self._along(u, lambda last: last @ self.forth)

    def values(self, v: Tensor) -> Tensor:
        """u of v."""
        return self._along(v, lambda last: last @ self.back)

    def slope(self, g: Tensor) -> Tensor:
        """The gradient in v, from the gradient ``g`` in u."""
        return self._along(g, lambda last: last @ self.back.mT)

    def precision(self, delta: Tensor) -> Tensor:
        """The prior precision of v, from the prior precision ``delta`` of u."""
        return self._along(delta, lambda last: last / self.spectrum)

    def _along(self, t: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply ``change`` with the anchors as the last axis: they run along inputs (``across``) or outputs of the matrix."""
        last = t.unflatten(-1, (-1, len(self.spectrum))) if self.across else t.mT
        return change(last).flatten(-2) if self.across else change(last).mT
