"""Paths: every linear map with its own prior.

Every path is one matrix, or K blocks of it, applied at S shared positions (the path law):

    path(x) == place(einsum("bski,koi->bsko", columns(x), weight), x)     weight: (K, out, in)
    <place(h, x), g> == <h, rows(g)>                                      rows is the adjoint of place

``columns`` and ``rows`` are the definition, and all that curvature needs; ``forward`` is the fast form of the same map.
(``place`` takes of ``x`` only its shape: the same convolution works on images of any size.)
What counts as a shared position is part of the definition: it fixes the Kronecker approximation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autosym.linear.products import gram


@dataclass(frozen=True)
class Kept:
    """What a linear map keeps: by default nothing.

    ``equivariant`` and ``invariant`` are to translations; a map that is constant in space is both. ``groups`` names the groups that it is
    equivariant to as well, its own first, then those within it. ``every``: whichever group it is, as for the mean over all positions.
    """

    equivariant: bool = False
    invariant: bool = False
    groups: tuple[str, ...] = ()
    every: bool = False

    def __contains__(self, group: str) -> bool:
        return self.every or group in self.groups

    def __and__(self, other: "Kept") -> "Kept":
        """What both keep."""
        common = tuple(group for group in self.groups or other.groups if group in self and group in other)
        translations = self.equivariant and other.equivariant, self.invariant and other.invariant
        return Kept(*translations, common, self.every and other.every)

    @property
    def group(self) -> str:
        """Its own group, if it has one."""
        return self.groups[0] if self.groups else ""


NOTHING = Kept()


class Path(nn.Module):
    """One linear map, ``weight`` of shape (K, out, in), under one prior."""

    weight: nn.Parameter
    start_size = 0.0  # of weights that were set to zero at the start: the root mean square they would have had

    def __init__(self, blocks: int, rows: int, columns: int, bound: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, rows, columns).uniform_(-bound, bound))

    @property
    def keeps(self) -> Kept:
        """Which symmetry the map has, whatever its weights: nothing, unless the path says so."""
        return NOTHING

    def size(self) -> float:
        """The size of the weights, in units of which relative steps are: their root mean square, or ``start_size``."""
        return float(self.weight.detach().square().mean().sqrt()) or self.start_size

    def columns(self, x: Tensor) -> Tensor:
        """The inputs of the matrix, (B, S, K, in)."""
        raise TypeError(f"{type(self).__name__} does not define columns")

    def gram(self, x: Tensor) -> Tensor:
        """sum over samples and positions of a a^T for the columns a of every block: (K, in, in)."""
        return gram(self.columns(x))

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        """Arrange the matrix's outputs (B, S, K, out) as the output of the path."""
        raise TypeError(f"{type(self).__name__} does not define place")

    def rows(self, g: Tensor) -> Tensor:
        """The adjoint of ``place``: a cotangent of the output, as (B, S, K, out)."""
        raise TypeError(f"{type(self).__name__} does not define rows")

    def forward(self, x: Tensor) -> Tensor:
        return self.place(torch.einsum("bski,koi->bsko", self.columns(x), self.weight), x)
