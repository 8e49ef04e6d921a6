"""Paths: linear maps, each with its own prior.

Every path is one matrix, or K blocks of it, applied at S shared positions (the path law):

    path(x) == place(einsum("bski,koi->bsko", columns(x), weight), x)     weight: (K, out, in)
    <place(h, x), g> == <h, rows(g)>                                      rows is the adjoint of place

``columns`` and ``rows`` define the path and are all that curvature needs; ``forward`` is a faster form of the same map.
``place`` uses only the shape of ``x``: a convolution works on images of any size.
The choice of shared positions is part of the definition: it fixes the Kronecker approximation.
A path describes its other properties by attributes and methods, which have defaults.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from autosym.linear.frames import Frame
from autosym.linear.groups import Group
from autosym.linear.plain import Convolution, Matrix, Modulated, Plain, matrix_of
from autosym.linear.products import gram

BORDERS, STRIDES, INTERPOLATION = "borders", "strides", "interpolation"


class Definition(Protocol):
    """The part of a path that curvature needs."""

    def columns(self, x: Tensor) -> Tensor: ...

    def gram(self, x: Tensor) -> Tensor: ...

    def rows(self, g: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Kept:
    """The symmetries that a linear map keeps: none by default.

    ``equivariant`` and ``invariant`` refer to translations; a map that is constant in space is both. ``groups`` names further
    groups of its equivariance: its own first, then those nested in it. ``every``: all groups, e.g. for a mean over positions.
    """

    equivariant: bool = False
    invariant: bool = False
    groups: tuple[str, ...] = ()
    every: bool = False

    def __contains__(self, group: str) -> bool:
        return self.every or group in self.groups

    def __and__(self, other: "Kept") -> "Kept":
        """The symmetries that both keep."""
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
    start_size = 0.0  # if weights start at zero: the root mean square they would have had
    in_shape: tuple[int, ...] | None = None  # the shape of one input, if only one is possible
    takes: Group | None = None  # the group, if the input's channels are its fields
    lifted: Group | None = None  # the group, if the output's channels are its fields
    factored = False  # whether its matrix multiplies the matrix of another path: Laplace depends on the factoring
    understated = False  # whether Kronecker curvature underestimates the exact one more than for other paths

    def __init__(self, blocks: int, rows: int, columns: int, bound: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, rows, columns).uniform_(-bound, bound))

    @property
    def keeps(self) -> Kept:
        """The symmetries that the map has for all weights. Default: none."""
        return NOTHING

    def size(self) -> float:
        """The root mean square of the weights, or ``start_size`` if they are zero: the unit of relative rates."""
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

    def definition(self, name: str) -> Callable[[Tensor], Definition] | None:
        """Given an input, the columns and rows of the parameter ``name``; None if the path does not define it."""
        return (lambda _: self) if name == "weight" else None

    def frame(self) -> Frame | None:
        """The coordinates in which the weights take steps. Default: None, the weights themselves."""
        return None

    def limits(self) -> tuple[str, ...]:
        """What makes its equivariance inexact: ``BORDERS``, ``STRIDES``, ``INTERPOLATION``, or nothing."""
        return ()

    def pictures(self) -> Tensor | None:
        """The weights as maps (n, height, width), from the plain form if it needs no input shape; None if there are no maps."""
        form = self.plain(None)
        form = form.convolution if isinstance(form, Modulated) else form
        if isinstance(form, Convolution):
            return form.filters.reshape(
                -1, *(1, *form.filters.shape[2:])[-2:]
            )  # a sequence is a map of height 1, a volume several maps
        return form.weight.reshape(-1, *form.in_shape[1:]) if isinstance(form, Matrix) and len(form.in_shape) == 3 else None

    def plain(self, in_shape: Sequence[int] | None) -> Plain | None:
        """The same map in plain torch, for inputs of ``in_shape``. Default: a dense matrix; None if the shape is not known."""
        return matrix_of(self, in_shape)

    def parts(self) -> dict[str, tuple[str, ...]]:
        """The parts that a relaxed layer may drop, each with the names of its paths."""
        return {"weights": ("",)}

    def offset(self) -> Tensor | None:
        """The bias that is added last. Default: None."""
        return None


class Tangents:
    """A few scalars that enter a path non-linearly, linearised by their derivatives: S = K = in = 1, so the block is exact.

    ``tangents`` (B, scalars, ...) are the derivatives of the output in the scalars.
    """

    def __init__(self, tangents: Tensor):
        self.tangents = tangents

    def columns(self, x: Tensor) -> Tensor:
        return x.new_ones(len(x), 1, 1, 1)

    def gram(self, x: Tensor) -> Tensor:
        return x.new_full((1, 1, 1), len(x))

    def rows(self, g: Tensor) -> Tensor:
        return torch.einsum("bmo,bo->bm", self.tangents.flatten(2), g.flatten(1))[:, None, None]
